//! Rotary position embedding: the angle each pair of a head's elements turns by from one position to the next.
//!
//! Plain: pair i of d / 2 turns by base^(-2i / d). The scalings stretch a model over more positions than it was
//! trained on:
//! - linear: every angle divided by the factor (kaiokendev, "Things I'm learning while training SuperHOT").
//! - YaRN (arXiv 2309.00071, section 3): slow pairs divided, fast ones kept, a ramp between, and the scores tempered by
//!   the square of 0.1 ln(factor) + 1.
//! - per-pair divisors from the tensor `rope_freqs.weight` (what Llama 3.1's scaling becomes in a GGUF).

use super::error::ModelError;
use super::gguf::Gguf;
use super::metadata::Keys;
use crate::backend::RopeSpec;
use llmd_kernels::quant::WeightType;

/// The tensor with per-pair divisors.
pub(super) const FREQUENCY_DIVISORS: &str = "rope_freqs.weight";

/// How positions are stretched.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RopeScaling {
    /// As trained.
    None,
    /// Angles divided by `factor`.
    Linear {
        /// New length over trained length.
        factor: f64,
    },
    /// NTK by parts.
    Yarn {
        /// New length over trained length.
        factor: f64,
        /// The length the model was trained on.
        original_context: usize,
        /// Turns within the trained length above which a pair is kept.
        beta_fast: f64,
        /// Turns below which a pair is divided whole.
        beta_slow: f64,
        /// Multiplies the tempering, 1 by default.
        attention_factor: f64,
    },
}

impl RopeScaling {
    /// From the keys `rope.scaling.*` (and the older `rope.scale_linear`).
    pub(super) fn read(keys: &Keys<'_>, context_length: usize) -> Result<Self, ModelError> {
        const FACTORS: std::ops::RangeInclusive<f64> = 1e-3..=1e6;
        let factor = keys.float("rope.scaling.factor", FACTORS)?;
        match keys.string("rope.scaling.type")? {
            None => Ok(match keys.float("rope.scale_linear", FACTORS)?.or(factor) {
                Some(factor) => Self::Linear { factor },
                None => Self::None,
            }),
            Some("none") => Ok(Self::None),
            Some("linear") => Ok(Self::Linear { factor: keys.required("rope.scaling.factor", factor)? }),
            Some("yarn") => Ok(Self::Yarn {
                factor: keys.required("rope.scaling.factor", factor)?,
                original_context: keys
                    .count("rope.scaling.original_context_length", 1..=super::architecture::limits::CONTEXT_MAX)?
                    .unwrap_or(context_length),
                beta_fast: keys.float("rope.scaling.yarn_beta_fast", FACTORS)?.unwrap_or(32.0),
                beta_slow: keys.float("rope.scaling.yarn_beta_slow", FACTORS)?.unwrap_or(1.0),
                attention_factor: keys.float("rope.scaling.attn_factor", FACTORS)?.unwrap_or(1.0),
            }),
            Some(other) => Err(keys.bad("rope.scaling.type", other, "none, linear and yarn are known")),
        }
    }

    /// The angles of `dimensions / 2` pairs. `divisors`, if any, has as many. Computed in f64 and rounded once.
    pub fn spec(self, dimensions: usize, base: f64, neox: bool, divisors: Option<&[f32]>) -> RopeSpec {
        assert!(dimensions.is_multiple_of(2) && divisors.is_none_or(|d| d.len() == dimensions / 2));
        let ramp = self.yarn_ramp(dimensions, base);
        let inverse_frequencies = (0..dimensions / 2)
            .map(|i| {
                let plain = base.powf(-2.0 * i as f64 / dimensions as f64) / divisors.map_or(1.0, |d| f64::from(d[i]));
                let scaled = match (self, ramp) {
                    (Self::Linear { factor }, _) => plain / factor,
                    (Self::Yarn { factor, .. }, Some((low, high))) => {
                        // 0: a fast pair, kept; 1: a slow one, divided.
                        let divided = ((i as f64 - low) / (high - low).max(1e-3)).clamp(0.0, 1.0);
                        plain / factor * divided + plain * (1.0 - divided)
                    }
                    _ => plain,
                };
                scaled as f32
            })
            .collect();
        let magnitude = match self {
            Self::Yarn { factor, attention_factor, .. } => attention_factor * (1.0 + 0.1 * factor.max(1.0).ln()),
            _ => 1.0,
        };
        RopeSpec { dimensions, neox, inverse_frequencies, magnitude: magnitude as f32 }
    }

    /// The pairs between which YaRN goes over from keeping to dividing.
    fn yarn_ramp(self, dimensions: usize, base: f64) -> Option<(f64, f64)> {
        let Self::Yarn { original_context, beta_fast, beta_slow, .. } = self else {
            return None;
        };
        // The pair that makes `turns` turns over the trained length.
        let pair = |turns: f64| {
            dimensions as f64 * (original_context as f64 / (turns * std::f64::consts::TAU)).ln() / (2.0 * base.ln())
        };
        Some((pair(beta_fast).floor().max(0.0), pair(beta_slow).ceil().min(dimensions as f64 - 1.0)))
    }
}

/// The per-pair divisors of a file, if it has them.
pub(super) fn frequency_divisors(gguf: &Gguf, dimensions: usize) -> Result<Option<Vec<f32>>, ModelError> {
    let Some(tensor) = gguf.tensor(FREQUENCY_DIVISORS) else {
        return Ok(None);
    };
    let (expected, found) = ((1, dimensions / 2), (tensor.rows, tensor.columns));
    if found != expected {
        return Err(ModelError::TensorShape { name: tensor.name.to_owned(), expected, found });
    }
    if tensor.ty != WeightType::F32 {
        return Err(ModelError::Unsupported(format!("tensor {} of type {}", tensor.name, tensor.ty.name())));
    }
    let divisors: Vec<f32> = tensor.bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect();
    if let Some(bad) = divisors.iter().find(|d| !(d.is_finite() && **d > 0.0)) {
        return Err(ModelError::Unsupported(format!("tensor {} has the element {bad}", tensor.name)));
    }
    Ok(Some(divisors))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(spec: &RopeSpec, expected: &[f32]) {
        assert_eq!(spec.inverse_frequencies.len(), expected.len());
        for (found, expected) in spec.inverse_frequencies.iter().zip(expected) {
            assert!((found / expected - 1.0).abs() < 2e-6, "{found} {expected}");
        }
    }

    #[test]
    fn plain_and_linear() {
        close(&RopeScaling::None.spec(8, 10_000.0, false, None), &[1.0, 0.1, 0.01, 0.001]);
        close(&RopeScaling::Linear { factor: 4.0 }.spec(8, 10_000.0, false, None), &[0.25, 0.025, 0.0025, 0.000_25]);
        close(
            &RopeScaling::None.spec(8, 10_000.0, false, Some(&[1.0, 2.0, 4.0, 8.0])),
            &[1.0, 0.05, 0.0025, 0.000_125],
        );
    }

    /// Expected values: transformers 5.24 `ROPE_INIT_FUNCTIONS["yarn"]`, head_dim 16, rope_theta 10000, factor 4,
    /// original_max_position_embeddings 2048.
    #[test]
    fn yarn_as_transformers_has_it() {
        let yarn = RopeScaling::Yarn {
            factor: 4.0,
            original_context: 2048,
            beta_fast: 32.0,
            beta_slow: 1.0,
            attention_factor: 1.0,
        };
        let spec = yarn.spec(16, 10_000.0, false, None);
        close(&spec, YARN_EXPECTED);
        assert!((spec.magnitude - YARN_MAGNITUDE).abs() < 1e-6);
    }
    const YARN_EXPECTED: &[f32] =
        &[1.0, 0.316_227_76, 0.1, 0.025_693_506, 0.006_25, 0.001_383_496_6, 0.000_25, 0.000_079_056_95];
    const YARN_MAGNITUDE: f32 = 1.138_629_4;
}
