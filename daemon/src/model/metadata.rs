//! Typed look-ups in a file's metadata, with errors that name the key.

use std::fmt::Display;
use std::ops::RangeInclusive;

use super::error::ModelError;
use super::gguf::{Array, Metadata, Value};

/// Look-ups of the keys that begin with `prefix`.
#[derive(Clone, Copy)]
pub(super) struct Keys<'a> {
    pub(super) metadata: &'a Metadata,
    pub(super) prefix: &'a str,
}

impl<'a> Keys<'a> {
    /// The whole key.
    pub(super) fn key(&self, suffix: &str) -> String {
        format!("{}{suffix}", self.prefix)
    }

    pub(super) fn bad(&self, suffix: &str, value: impl Display, reason: impl Into<String>) -> ModelError {
        ModelError::BadValue { key: self.key(suffix), value: value.to_string(), reason: reason.into() }
    }

    /// `found`, or the error that it is missing.
    pub(super) fn required<T>(&self, suffix: &str, found: Option<T>) -> Result<T, ModelError> {
        found.ok_or_else(|| ModelError::MissingKey { key: self.key(suffix) })
    }

    /// A whole number within `range`.
    pub(super) fn count(&self, suffix: &str, range: RangeInclusive<usize>) -> Result<Option<usize>, ModelError> {
        let number = match self.get(suffix) {
            None => return Ok(None),
            Some(Value::Unsigned(number)) => i128::from(*number),
            Some(Value::Signed(number)) => i128::from(*number),
            Some(other) => return Err(self.wrong(suffix, "a whole number", other)),
        };
        match usize::try_from(number).ok().filter(|n| range.contains(n)) {
            Some(number) => Ok(Some(number)),
            None => Err(self.bad(suffix, number, format!("it must be {} to {}", range.start(), range.end()))),
        }
    }

    /// A finite number within `range`.
    pub(super) fn float(&self, suffix: &str, range: RangeInclusive<f64>) -> Result<Option<f64>, ModelError> {
        match self.get(suffix) {
            None => Ok(None),
            Some(Value::Float(number)) if range.contains(number) => Ok(Some(*number)),
            Some(Value::Float(number)) => {
                Err(self.bad(suffix, number, format!("it must be {} to {}", range.start(), range.end())))
            }
            Some(other) => Err(self.wrong(suffix, "a number with a fraction", other)),
        }
    }

    pub(super) fn bool(&self, suffix: &str) -> Result<Option<bool>, ModelError> {
        match self.get(suffix) {
            None => Ok(None),
            Some(Value::Bool(value)) => Ok(Some(*value)),
            Some(other) => Err(self.wrong(suffix, "a boolean", other)),
        }
    }

    pub(super) fn string(&self, suffix: &str) -> Result<Option<&'a str>, ModelError> {
        match self.get(suffix) {
            None => Ok(None),
            Some(Value::String(value)) => Ok(Some(value)),
            Some(other) => Err(self.wrong(suffix, "a string", other)),
        }
    }

    pub(super) fn strings(&self, suffix: &str) -> Result<Option<&'a [String]>, ModelError> {
        match self.get(suffix) {
            None => Ok(None),
            Some(Value::Array(Array::String(values))) => Ok(Some(values)),
            Some(other) => Err(self.wrong(suffix, "an array of strings", other)),
        }
    }

    pub(super) fn floats(&self, suffix: &str) -> Result<Option<Vec<f32>>, ModelError> {
        match self.get(suffix) {
            None => Ok(None),
            Some(Value::Array(Array::Float(values))) => Ok(Some(values.iter().map(|&v| v as f32).collect())),
            Some(other) => Err(self.wrong(suffix, "an array of numbers with a fraction", other)),
        }
    }

    /// Whole numbers that fit an i32.
    pub(super) fn integers(&self, suffix: &str) -> Result<Option<Vec<i32>>, ModelError> {
        let too_large = |value: i128| self.bad(suffix, value, "it does not fit 32 bits");
        match self.get(suffix) {
            None => Ok(None),
            Some(Value::Array(Array::Signed(values))) => values
                .iter()
                .map(|&v| i32::try_from(v).map_err(|_| too_large(v.into())))
                .collect::<Result<_, _>>()
                .map(Some),
            Some(Value::Array(Array::Unsigned(values))) => values
                .iter()
                .map(|&v| i32::try_from(v).map_err(|_| too_large(v.into())))
                .collect::<Result<_, _>>()
                .map(Some),
            Some(other) => Err(self.wrong(suffix, "an array of whole numbers", other)),
        }
    }

    fn get(&self, suffix: &str) -> Option<&'a Value> {
        self.metadata.get(&self.key(suffix))
    }

    fn wrong(&self, suffix: &str, wanted: &'static str, found: &Value) -> ModelError {
        ModelError::WrongType { key: self.key(suffix), wanted, found: found.kind() }
    }
}
