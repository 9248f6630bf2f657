//! Softmax and attention.

/// e^(x - max) / sum of those.
pub fn softmax(x: &[f64]) -> Vec<f64> {
    let max = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = x.iter().map(|x| (x - max).exp()).sum();
    x.iter().map(|x| (x - max).exp() / sum).collect()
}

/// One query head over the keys and values of its positions: `q` is (head_dim), `keys` and `values` (positions, head_dim).
pub fn attention(q: &[f32], keys: &[f32], values: &[f32], scale: f32) -> Vec<f32> {
    let head_dim = q.len();
    let score = |key: &[f32]| -> f64 { key.iter().zip(q).map(|(&k, &q)| f64::from(k) * f64::from(q)).sum() };
    let scores: Vec<f64> = keys.chunks_exact(head_dim).map(|key| score(key) * f64::from(scale)).collect();
    let mut out = vec![0.0; head_dim];
    for (weight, value) in softmax(&scores).iter().zip(values.chunks_exact(head_dim)) {
        for (out, &value) in out.iter_mut().zip(value) {
            *out += weight * f64::from(value);
        }
    }
    out.iter().map(|&out| out as f32).collect()
}
