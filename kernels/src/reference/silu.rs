//! The gate of a SwiGLU feed-forward.

/// silu(gate) * up with silu(x) = x / (1 + e^-x), element by element.
pub fn silu_mul(gate: &[f32], up: &[f32]) -> Vec<f32> {
    let one = |gate: f64, up: f64| (gate / (1.0 + (-gate).exp()) * up) as f32;
    gate.iter().zip(up).map(|(&gate, &up)| one(f64::from(gate), f64::from(up))).collect()
}
