//! The one kind of error here: a sentence for the person who typed the command.

use std::fmt;

/// What went wrong, outermost context first. It is shown and never matched on.
#[derive(Debug)]
pub struct Failure(String);

/// A result whose error is a sentence.
pub type Result<T> = std::result::Result<T, Failure>;

impl Failure {
    /// A failure that says `message`.
    pub fn new(message: impl Into<String>) -> Self {
        Self(message.into())
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Puts what was being done before what went wrong.
pub trait Context<T> {
    /// `doing` completes "cannot ...".
    fn cannot(self, doing: impl fmt::Display) -> Result<T>;
}

impl<T, E: fmt::Display> Context<T> for std::result::Result<T, E> {
    fn cannot(self, doing: impl fmt::Display) -> Result<T> {
        self.map_err(|error| Failure(format!("cannot {doing}: {error}")))
    }
}
