//! From logits to weights: what softmax gives before it is divided by its sum, so the likeliest token has weight 1.
//!
//! The exponential is our own: a few multiplications that compilers turn into vector code on any machine, and that give
//! the same bits on every one, which a library's `exp` does not promise.

/// Below this distance from the top (in units of the temperature) a weight is 0: e^-87 is the least normal f32.
pub const DISTANCE_MAX: f32 = 87.0;

/// Tokens whose weights are summed in f32 before the sum goes on in f64.
pub const CHUNK: usize = 256;
const LANES: usize = 16;

/// How a row's logits become weights.
#[derive(Debug, Clone, Copy)]
pub struct Scale {
    /// The largest logit of the row; not -inf.
    pub top: f32,
    /// 1 / temperature; may be infinite.
    pub inverse_temperature: f32,
}

impl Scale {
    /// How far a logit is below the top, in units of the temperature: 0 at the top, NaN for NaN.
    #[inline(always)]
    pub fn distance(&self, logit: f32) -> f32 {
        // At the top the product may be 0 * inf or the difference inf - inf.
        if logit == self.top { 0.0 } else { (self.top - logit) * self.inverse_temperature }
    }

    /// The weight of a logit: 1 at the top, 0 for -inf and NaN.
    #[inline(always)]
    pub fn weight(&self, logit: f32) -> f32 {
        exp_of_negative(self.distance(logit))
    }

    /// Sum of the weights of one chunk, always in the same order.
    pub fn mass(&self, chunk: &[f32]) -> f64 {
        let mut lanes = [0f32; LANES];
        let mut parts = chunk.chunks_exact(LANES);
        for part in &mut parts {
            for (lane, &logit) in lanes.iter_mut().zip(part) {
                *lane += self.weight(logit);
            }
        }
        for (lane, &logit) in lanes.iter_mut().zip(parts.remainder()) {
            *lane += self.weight(logit);
        }
        lanes.iter().map(|&lane| f64::from(lane)).sum()
    }
}

/// e^-x for x >= 0 within 2 units in the last place; 0 above DISTANCE_MAX and for NaN.
///
/// x = n ln 2 + r with |r| <= ln 2 / 2; e^r by its Taylor polynomial of degree 7 (remainder below 1e-8), 2^n by the exponent's
/// bits. No branches.
#[inline(always)]
fn exp_of_negative(x: f32) -> f32 {
    // Adding this rounds to an integer that stands in the low bits.
    const ROUND: f32 = 12_582_912.0;
    // ln 2 in two parts; the product of the first with a small integer is exact.
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    // Comparing so that NaN is not inside.
    let inside = x <= DISTANCE_MAX;
    let y = if inside { -x } else { 0.0 };
    let rounded = y * std::f32::consts::LOG2_E + ROUND;
    let n = rounded - ROUND;
    let r = (y - n * LN2_HIGH) - n * LN2_LOW;
    let mut p = 1.0 / 5040.0;
    for coefficient in [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0] {
        p = p * r + coefficient;
    }
    let power = rounded.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(127) << 23;
    if inside { p * f32::from_bits(power) } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_exponential_is_exact_to_two_units() {
        let mut worst = 0f64;
        for n in 0..=870_000 {
            let x = n as f32 * 1e-4;
            let exact = (-f64::from(x)).exp();
            worst = worst.max((f64::from(exp_of_negative(x)) - exact).abs() / exact);
        }
        assert!(worst < 2.4e-7, "{worst:e}");
        assert_eq!(exp_of_negative(0.0), 1.0);
        assert_eq!([88.0, f32::INFINITY, f32::NAN].map(exp_of_negative), [0.0; 3]);
        assert!(exp_of_negative(DISTANCE_MAX) > 0.0);
    }

    #[test]
    fn extremes_have_weights() {
        let weights = |top: f32, inverse_temperature: f32| {
            let scale = Scale { top, inverse_temperature };
            [top, 1.0, -3.0, f32::NEG_INFINITY, f32::NAN].map(|logit| scale.weight(logit))
        };
        assert_eq!(weights(f32::INFINITY, 1.0), [1.0, 0.0, 0.0, 0.0, 0.0]);
        assert_eq!(weights(2.0, f32::INFINITY), [1.0, 0.0, 0.0, 0.0, 0.0]);
        assert_eq!(weights(2.0, 1e30), [1.0, 0.0, 0.0, 0.0, 0.0]);
        assert_eq!(weights(f32::MAX, 0.01)[0], 1.0);
    }

    #[test]
    fn the_mass_is_the_sum() {
        let scale = Scale { top: 0.0, inverse_temperature: 1.0 };
        let logits: Vec<f32> = (0..251).map(|n| -(n as f32) * 0.01).collect();
        let exact: f64 = logits.iter().map(|&l| f64::from(l).exp()).sum();
        assert!((scale.mass(&logits) - exact).abs() / exact < 1e-6);
    }
}
