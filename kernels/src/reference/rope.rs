//! Rotary position embedding.

/// Rotates one head in place by its position: pairs (i, i + n) when `neox`, (2i, 2i + 1) otherwise, with n =
/// `inverse_frequencies.len()`; elements from 2n on stay. Angles are the f32 product position * frequency, as models are
/// trained with; sine and cosine of it are exact.
pub fn rope(head: &mut [f32], position: u32, inverse_frequencies: &[f32], magnitude: f32, neox: bool) {
    let pairs = inverse_frequencies.len();
    for (i, &frequency) in inverse_frequencies.iter().enumerate() {
        let angle = f64::from(position as f32 * frequency);
        let (sin, cos) = (angle.sin() * f64::from(magnitude), angle.cos() * f64::from(magnitude));
        let (a, b) = if neox { (i, i + pairs) } else { (2 * i, 2 * i + 1) };
        let (x, y) = (f64::from(head[a]), f64::from(head[b]));
        head[a] = (x * cos - y * sin) as f32;
        head[b] = (y * cos + x * sin) as f32;
    }
}
