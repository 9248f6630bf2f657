//! Root mean square normalisation.

/// x / sqrt(mean(x^2) + eps) * weight of one row; `x` and `weight` are (columns).
pub fn rms_norm(x: &[f32], weight: &[f32], eps: f32) -> Vec<f32> {
    assert_eq!(x.len(), weight.len());
    let mean = x.iter().map(|&x| f64::from(x) * f64::from(x)).sum::<f64>() / x.len() as f64;
    let factor = 1.0 / (mean + f64::from(eps)).sqrt();
    x.iter().zip(weight).map(|(&x, &w)| (f64::from(x) * factor * f64::from(w)) as f32).collect()
}
