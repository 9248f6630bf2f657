//! Checks of single values. An error names key, value, origin and what is allowed.

use super::settings::MetricsAddress;
use super::{ConfigError, Origins, SOCKET_PATH_BYTES_MAX, Written};
use std::ops::RangeInclusive;
use std::path::PathBuf;

/// Checks of single values; knows where each was written.
pub(super) struct Check<'a> {
    pub(super) origins: &'a Origins,
}

impl Check<'_> {
    pub(super) fn origin(&self, key: &str) -> String {
        self.origins.get(key).cloned().unwrap_or_else(|| "the configuration".to_owned())
    }

    pub(super) fn refuse(&self, key: &'static str, written: &Written, allowed: impl Into<String>) -> ConfigError {
        ConfigError::Value { key, value: written.0.clone(), origin: self.origin(key), allowed: allowed.into() }
    }

    pub(super) fn integer(
        &self,
        key: &'static str,
        written: &Written,
        range: &RangeInclusive<u64>,
        also: &str,
    ) -> Result<usize, ConfigError> {
        match written.0.parse::<u64>() {
            Ok(number) if range.contains(&number) => Ok(number as usize),
            _ => {
                let allowed = format!("{also}a whole number from {} to {}", range.start(), range.end());
                Err(self.refuse(key, written, allowed))
            }
        }
    }

    pub(super) fn choice<T: Copy>(
        &self,
        key: &'static str,
        written: &Option<Written>,
        choices: &[(&'static str, T)],
        default: T,
    ) -> Result<T, ConfigError> {
        let Some(written) = written else { return Ok(default) };
        choices.iter().find(|(word, _)| *word == written.0).map(|(_, value)| *value).ok_or_else(|| {
            let words: Vec<&str> = choices.iter().map(|(word, _)| *word).collect();
            self.refuse(key, written, format!("one of {}", words.join(", ")))
        })
    }

    pub(super) fn socket_path(&self, key: &'static str, written: &Written, path: &str) -> Result<PathBuf, ConfigError> {
        if path.is_empty() || path.len() > SOCKET_PATH_BYTES_MAX || path.contains('\0') {
            let allowed =
                format!("a path of 1 to {SOCKET_PATH_BYTES_MAX} bytes, as the kernel has it for Unix sockets");
            return Err(self.refuse(key, written, allowed));
        }
        Ok(PathBuf::from(path))
    }

    pub(super) fn metrics(&self, written: &Written) -> Result<Option<MetricsAddress>, ConfigError> {
        let text = written.0.as_str();
        if text == "off" {
            return Ok(None);
        }
        if let Some(path) = text.strip_prefix("unix:") {
            let path = self.socket_path("metrics", written, path)?;
            return Ok(Some(MetricsAddress::Unix(path)));
        }
        text.parse().map(|address| Some(MetricsAddress::Tcp(address))).map_err(|_| {
            self.refuse("metrics", written, "off, an address with port such as 127.0.0.1:9400, or unix:/path")
        })
    }
}

/// "2GiB", "512 MiB", "64KiB", "1048576" in bytes; also GB, MB, kB in powers of ten.
pub(super) fn parse_bytes(text: &str) -> Option<u64> {
    const UNITS: [(&str, u64); 9] = [
        ("TiB", 1 << 40),
        ("GiB", 1 << 30),
        ("MiB", 1 << 20),
        ("KiB", 1 << 10),
        ("TB", 1_000_000_000_000),
        ("GB", 1_000_000_000),
        ("MB", 1_000_000),
        ("kB", 1_000),
        ("B", 1),
    ];
    let (digits, unit) = UNITS
        .iter()
        .find_map(|(name, unit)| text.strip_suffix(name).map(|digits| (digits.trim_end(), *unit)))
        .unwrap_or((text, 1));
    digits.parse::<u64>().ok()?.checked_mul(unit)
}
