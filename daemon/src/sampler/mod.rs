//! One row of logits to one token id.
//!
//! In this order: the penalties change logits of tokens seen; while fewer than `min_tokens` are out, the ids that end a
//! generation get -inf; temperature; top-k; top-p among what top-k left; min-p; one draw.
//!
//! What is drawn is a function of the row, the parameters and the position in the output, of nothing else: neither
//! of neighbours in the batch nor of what this sampler drew before. See `philox`.
//!
//! Strange logits: NaN counts as -inf, and -inf is never drawn; of several +inf one is drawn evenly. Where nothing can
//! be drawn, the answer is the lowest id that may be sampled.

mod philox;
mod select;
mod weight;

use crate::sequence::Sampling;
use philox::uniform;
use select::Candidate;
use weight::{CHUNK, Scale};

/// Which of a request's samples is drawn: a request has one.
const SAMPLE: u32 = 0;

/// What a sequence has said so far.
#[derive(Debug, Clone, Copy)]
pub struct Tokens<'a> {
    /// Ids of the prompt.
    pub prompt: &'a [u32],
    /// Ids generated.
    pub output: &'a [u32],
}

/// How often a token was seen, valid while the stamp is the current one.
#[derive(Debug, Clone, Copy, Default)]
struct Seen {
    stamp: u32,
    count: u32,
}

/// Draws tokens. Holds scratch space for one vocabulary and no state: any row may go through any sampler.
#[derive(Debug)]
pub struct Sampler {
    candidates: Vec<Candidate>,
    seen: Vec<Seen>,
    stamp: u32,
    /// Mass of each CHUNK of the row.
    masses: Vec<f64>,
}

impl Sampler {
    /// Scratch space for rows of `vocab_size` logits. Nothing is allocated later, but for rows longer than that.
    pub fn new(vocab_size: usize) -> Self {
        Self {
            candidates: Vec::with_capacity(vocab_size),
            seen: vec![Seen::default(); vocab_size],
            stamp: 0,
            masses: Vec::with_capacity(vocab_size.div_ceil(CHUNK)),
        }
    }

    /// Chooses the token that follows `history` from `logits` (vocabulary), which are changed by penalties. Ids in `history`
    /// and among the stop ids that are not below the row's length are passed over; an empty row gives 0.
    pub fn sample(&mut self, logits: &mut [f32], sampling: &Sampling, history: Tokens<'_>) -> u32 {
        self.penalize(logits, sampling, history);
        let suppressed: &[u32] =
            if history.output.len() < sampling.min_tokens as usize { &sampling.stop_token_ids } else { &[] };
        for &id in suppressed {
            if let Some(logit) = logits.get_mut(id as usize) {
                *logit = f32::NEG_INFINITY;
            }
        }
        let (best, top) = best(logits);
        if top == f32::NEG_INFINITY {
            return (0..logits.len() as u32).find(|id| !suppressed.contains(id)).unwrap_or(0);
        }
        if sampling.temperature <= 0.0 {
            return best;
        }
        let draw = uniform(sampling.seed, history.output.len() as u64, SAMPLE);
        self.draw(logits, top, sampling, draw)
    }

    /// Repetition penalty on all tokens seen, then presence and frequency penalty on those of the output.
    fn penalize(&mut self, logits: &mut [f32], sampling: &Sampling, history: Tokens<'_>) {
        let repetition = sampling.repetition_penalty;
        let (presence, frequency) = (sampling.presence_penalty, sampling.frequency_penalty);
        if repetition == 1.0 && presence == 0.0 && frequency == 0.0 {
            return;
        }
        if self.seen.len() < logits.len() {
            self.seen.resize(logits.len(), Seen::default());
        }
        self.stamp = self.stamp.wrapping_add(1);
        if self.stamp == 0 {
            self.seen.fill(Seen::default());
            self.stamp = 1;
        }
        let stamp = self.stamp;
        let repeated = |logit: f32| {
            if logit > 0.0 { logit / repetition } else { logit * repetition }
        };
        let inside = |id: &&u32| (**id as usize) < logits.len();
        for &id in history.output.iter().filter(inside) {
            let seen = &mut self.seen[id as usize];
            *seen = Seen { stamp, count: if seen.stamp == stamp { seen.count + 1 } else { 1 } };
        }
        // Each token once: when it is met first, its count is taken away.
        for &id in history.output {
            let Some(logit) = logits.get_mut(id as usize) else {
                continue;
            };
            let count = std::mem::take(&mut self.seen[id as usize].count);
            if count > 0 {
                *logit = repeated(*logit) - presence - frequency * count as f32;
            }
        }
        if repetition == 1.0 {
            return;
        }
        for &id in history.prompt {
            let Some(logit) = logits.get_mut(id as usize) else {
                continue;
            };
            let seen = &mut self.seen[id as usize];
            if seen.stamp != stamp {
                *seen = Seen { stamp, count: 0 };
                *logit = repeated(*logit);
            }
        }
    }

    /// Temperature, top-k, top-p, min-p, and the token at `draw` in [0, 1) of what is left. `top` is the row's largest
    /// logit, above -inf.
    fn draw(&mut self, logits: &[f32], top: f32, sampling: &Sampling, draw: f64) -> u32 {
        let scale = Scale { top, inverse_temperature: 1.0 / sampling.temperature };
        let top_k = sampling.top_k as usize;
        let top_p = f64::from(sampling.top_p);
        let all_k = top_k == 0 || top_k >= logits.len();
        let all_p = top_p >= 1.0;
        // The likeliest token always stays.
        let min_p = sampling.min_p.min(1.0);
        if all_k && all_p && min_p <= 0.0 {
            return self.draw_of_all(logits, scale, draw);
        }
        let kept = &mut self.candidates;
        if all_k && all_p {
            select::min_p(logits, min_p, scale, kept);
        } else if all_k {
            let whole: f64 = logits.chunks(CHUNK).map(|chunk| scale.mass(chunk)).sum();
            select::top_p(logits, top_p * whole, min_p, scale, kept);
        } else {
            select::top_k(logits, top_k, kept);
            if !all_p {
                let mass = top_p * select::mass_of(kept, scale);
                let (count, _) = select::front(kept, mass, scale);
                kept.truncate(count);
            }
        }
        select::to_weights(kept, scale);
        kept.retain(|candidate| candidate.value >= min_p);
        let target = draw * kept.iter().map(|c| f64::from(c.value)).sum::<f64>();
        let mut sum = 0.0;
        for candidate in kept.iter() {
            sum += f64::from(candidate.value);
            if sum > target {
                return candidate.id;
            }
        }
        // Only where the product was rounded up to the whole mass: the last that has any weight.
        kept.iter().rev().find(|c| c.value > 0.0).or(kept.first()).map_or(0, |c| c.id)
    }

    /// A draw from the whole vocabulary: the chunk first, then the token inside it.
    fn draw_of_all(&mut self, logits: &[f32], scale: Scale, draw: f64) -> u32 {
        self.masses.clear();
        self.masses.extend(logits.chunks(CHUNK).map(|chunk| scale.mass(chunk)));
        let target = draw * self.masses.iter().sum::<f64>();
        let mut before = 0.0;
        let mut chosen = (0, 0.0);
        for (chunk, &mass) in self.masses.iter().enumerate() {
            if mass > 0.0 {
                chosen = (chunk, before);
            }
            if before + mass > target {
                break;
            }
            before += mass;
        }
        let (chunk, mut sum) = chosen;
        let start = chunk * CHUNK;
        let mut last = start;
        for (id, &logit) in logits.iter().enumerate().skip(start).take(CHUNK) {
            let weight = scale.weight(logit);
            if weight > 0.0 {
                last = id;
                sum += f64::from(weight);
                if sum > target {
                    break;
                }
            }
        }
        last as u32
    }
}

/// The lowest id of those with the largest logit, and that logit; -inf if none is above it. One pass: the best chunk is
/// found in vector code, and only it is searched for the place.
fn best(logits: &[f32]) -> (u32, f32) {
    const LANES: usize = 16;
    let greater = |a: f32, b: f32| if b > a { b } else { a };
    let mut top = f32::NEG_INFINITY;
    let mut found = 0;
    for (index, chunk) in logits.chunks(CHUNK).enumerate() {
        let mut lanes = [f32::NEG_INFINITY; LANES];
        let mut parts = chunk.chunks_exact(LANES);
        for part in &mut parts {
            for (lane, &logit) in lanes.iter_mut().zip(part) {
                *lane = greater(*lane, logit);
            }
        }
        let rest = parts.remainder().iter().copied().fold(f32::NEG_INFINITY, greater);
        let best = lanes.into_iter().fold(rest, greater);
        if best > top {
            top = best;
            found = index;
        }
    }
    let start = found * CHUNK;
    let place = logits[start..].iter().position(|&logit| logit == top).unwrap_or(0);
    ((start + place) as u32, top)
}

#[cfg(test)]
mod tests;
