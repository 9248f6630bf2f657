//! Which tokens stay: top-k, top-p and min-p without sorting the whole vocabulary.

use std::cmp::Ordering;

use super::weight::{DISTANCE_MAX, Scale};

/// A token that may be drawn.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Candidate {
    /// Its id.
    pub id: u32,
    /// Its logit while candidates are chosen, its weight afterwards.
    pub value: f32,
}

/// Likelier first; of equals (0 and -0 are equal) the lower id. A total order: values here are never NaN.
fn likelier(a: &Candidate, b: &Candidate) -> Ordering {
    b.value.partial_cmp(&a.value).unwrap_or(Ordering::Equal).then(a.id.cmp(&b.id))
}

/// Longest list that is sorted rather than halved.
const SORTED_MAX: usize = 1024;

/// Fills `kept` with the `k` likeliest tokens and their logits (fewer if fewer are above -inf); k >= 1. They are sorted
/// where they are at most SORTED_MAX.
///
/// Tokens above the k-th best so far are collected, and whenever twice as many are there the worse half goes: each
/// clearing costs as much as it frees, so the whole is linear in the vocabulary whatever the order.
pub fn top_k(logits: &[f32], k: usize, kept: &mut Vec<Candidate>) {
    const BLOCK: usize = 64;
    let capacity = k.saturating_mul(2).max(k.saturating_add(BLOCK)).min(logits.len());
    let mut floor = f32::NEG_INFINITY;
    kept.clear();
    for (block, values) in logits.chunks(BLOCK).enumerate() {
        // Most blocks have nothing above the floor; this test is vector code.
        if !values.iter().fold(false, |any, &value| any | (value > floor)) {
            continue;
        }
        for (offset, &value) in values.iter().enumerate() {
            // Of equals the lower id stays, and that one came first. NaN is above nothing. The floor may rise in a block.
            if value > floor {
                kept.push(Candidate { id: (block * BLOCK + offset) as u32, value });
                if kept.len() == capacity && capacity > k {
                    kept.select_nth_unstable_by(k - 1, likelier);
                    kept.truncate(k);
                    floor = kept[k - 1].value;
                }
            }
        }
    }
    if kept.len() > k {
        kept.select_nth_unstable_by(k - 1, likelier);
        kept.truncate(k);
    }
    if kept.len() <= SORTED_MAX {
        kept.sort_unstable_by(likelier);
    }
}

/// Puts in front the fewest of the likeliest candidates (with logits) whose weights sum to `mass` at least. Returns how many
/// they are and their sum.
///
/// Long lists are halved around their median until the border lies in a short one: linear, where sorting a whole vocabulary
/// (a flat distribution, as high temperatures make it) would hold up every other row for milliseconds.
pub fn front(candidates: &mut [Candidate], mass: f64, scale: Scale) -> (usize, f64) {
    let (mut from, mut to) = (0, candidates.len());
    let mut sum = 0.0;
    while to - from > SORTED_MAX {
        let half = (to - from) / 2;
        candidates[from..to].select_nth_unstable_by(half, likelier);
        let upper = mass_of(&candidates[from..from + half], scale);
        if sum + upper >= mass {
            to = from + half;
        } else {
            from += half;
            sum += upper;
        }
    }
    candidates[from..to].sort_unstable_by(likelier);
    for (at, candidate) in candidates.iter().enumerate().take(to).skip(from) {
        sum += f64::from(scale.weight(candidate.value));
        if sum >= mass {
            return (at + 1, sum);
        }
    }
    (to, sum)
}

/// Sum of the weights of candidates with logits.
pub fn mass_of(candidates: &[Candidate], scale: Scale) -> f64 {
    candidates.iter().map(|c| f64::from(scale.weight(c.value))).sum()
}

/// Fills `kept` with the fewest of the likeliest tokens (and their logits) whose weights sum to `mass` at least.
/// Tokens with weights below `weight_min` may be missing, for min-p takes them anyway.
///
/// Tokens are taken from the top down in tiers of distance. Real distributions are done after the first or second.
pub fn top_p(logits: &[f32], mass: f64, weight_min: f32, scale: Scale, kept: &mut Vec<Candidate>) {
    /// Lower ends of the tiers. The first holds weights above 5 %, and so on; below the last weights are 0.
    const TIERS: [f32; 5] = [3.0, 6.0, 10.0, 16.0, DISTANCE_MAX];
    kept.clear();
    let far = distance_of(weight_min);
    let mut sum = 0.0;
    let mut above = -1.0;
    for tier in TIERS {
        if sum >= mass || above > far {
            return;
        }
        let start = kept.len();
        for (id, &value) in logits.iter().enumerate() {
            let distance = scale.distance(value);
            if distance > above && distance <= tier {
                kept.push(Candidate { id: id as u32, value });
            }
        }
        let (count, more) = front(&mut kept[start..], mass - sum, scale);
        kept.truncate(start + count);
        sum += more;
        above = tier;
    }
}

/// The distance beyond which weights are below `weight` for certain: a little more than the logarithm, for its rounding.
fn distance_of(weight: f32) -> f32 {
    (-weight.ln()).min(DISTANCE_MAX) + 1e-3
}

/// Fills `kept` with all tokens (and their logits) whose weight is at least `weight_min`, in the order of ids.
pub fn min_p(logits: &[f32], weight_min: f32, scale: Scale, kept: &mut Vec<Candidate>) {
    let far = distance_of(weight_min);
    kept.clear();
    for (id, &logit) in logits.iter().enumerate() {
        if scale.distance(logit) <= far && scale.weight(logit) >= weight_min {
            kept.push(Candidate { id: id as u32, value: logit });
        }
    }
}

/// Replaces each candidate's logit by its weight.
pub fn to_weights(candidates: &mut [Candidate], scale: Scale) {
    for candidate in candidates {
        candidate.value = scale.weight(candidate.value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn scale(logits: &[f32]) -> Scale {
        Scale { top: logits.iter().copied().fold(f32::NEG_INFINITY, f32::max), inverse_temperature: 1.0 }
    }

    proptest! {
        #[test]
        fn top_k_is_the_front_of_the_sorted_whole(
            // Few values, so that there are ties; lengths beyond several blocks; rising runs, so that clearing is frequent.
            logits in proptest::collection::vec(prop_oneof![(0i32..20).prop_map(|n| n as f32), Just(f32::NEG_INFINITY), Just(f32::NAN)], 1..700),
            rising: bool, k in 1usize..40,
        ) {
            let mut logits = logits;
            if rising {
                logits.sort_by(f32::total_cmp);
            }
            let mut expected: Vec<_> = logits.iter().enumerate().filter(|(_, l)| **l > f32::NEG_INFINITY)
                .map(|(id, &value)| Candidate { id: id as u32, value }).collect();
            prop_assume!(!expected.is_empty());
            expected.sort_by(likelier);
            expected.truncate(k);
            let mut kept = Vec::new();
            top_k(&logits, k, &mut kept);
            prop_assert_eq!(kept.iter().map(|c| c.id).collect::<Vec<_>>(), expected.iter().map(|c| c.id).collect::<Vec<_>>());
        }

        #[test]
        fn top_p_is_the_front_of_the_sorted_whole(
            // Wide and flat, few and many.
            logits in prop_oneof![
                proptest::collection::vec(-30f32..0.0, 1..400),
                proptest::collection::vec(-1f32..0.0, 1..5000),
                proptest::collection::vec((-3i32..0).prop_map(|n| n as f32), 1..5000),
            ],
            p in 0.01f64..1.0,
        ) {
            let scale = scale(&logits);
            let mut all: Vec<_> = logits.iter().enumerate().map(|(id, &value)| Candidate { id: id as u32, value }).collect();
            all.sort_by(likelier);
            let mass = p * mass_of(&all, scale);
            let mut sum = 0.0;
            let count = all.iter().take_while(|c| { let more = sum < mass; sum += f64::from(scale.weight(c.value)); more }).count();
            let mut kept = Vec::new();
            top_p(&logits, mass, 0.0, scale, &mut kept);
            kept.sort_by(likelier);
            prop_assert_eq!(&kept[..], &all[..count]);
        }
    }
}
