//! Matrix products.

/// x * weight^T (+ bias): `x` is (rows, columns), `weight` (outputs, columns), the result (rows, outputs).
pub fn linear(x: &[f32], weight: &[f32], bias: Option<&[f32]>, columns: usize) -> Vec<f32> {
    let outputs = weight.len() / columns;
    let mut out = Vec::with_capacity(x.len() / columns * outputs);
    for x in x.chunks_exact(columns) {
        for (output, weight) in weight.chunks_exact(columns).enumerate() {
            let dot: f64 = x.iter().zip(weight).map(|(&x, &w)| f64::from(x) * f64::from(w)).sum();
            out.push((dot + bias.map_or(0.0, |bias| f64::from(bias[output]))) as f32);
        }
    }
    out
}
