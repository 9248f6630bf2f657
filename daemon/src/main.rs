//! The llmd process.
fn main() {}
