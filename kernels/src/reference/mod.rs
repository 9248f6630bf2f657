//! The plain truth of each operation: scalar, in f64 inside, no care for speed. Every fast kernel is compared with these.
//!
//! Arrays are row-major; shapes stand at each function.

mod attention;
mod linear;
mod norm;
mod rope;
mod silu;

pub use attention::{attention, softmax};
pub use linear::linear;
pub use norm::rms_norm;
pub use rope::rope;
pub use silu::silu_mul;
