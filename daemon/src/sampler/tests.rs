//! Against a plain f64 oracle, with fixed seeds.

use proptest::prelude::*;

use super::*;

fn sampling() -> Sampling {
    Sampling { temperature: 1.0, seed: 7, ..Sampling::greedy(100) }
}

fn greedy() -> Sampling {
    Sampling { temperature: 0.0, ..sampling() }
}

const NOTHING: Tokens<'static> = Tokens { prompt: &[], output: &[] };

fn sample(logits: &[f32], sampling: &Sampling, history: Tokens<'_>) -> u32 {
    Sampler::new(logits.len()).sample(&mut logits.to_vec(), sampling, history)
}

#[test]
fn greedy_takes_the_best_and_of_equals_the_lowest() {
    assert_eq!(sample(&[0.0, 2.0, 1.0, 2.0], &greedy(), NOTHING), 1);
    let mut long = vec![-1.0; 1000];
    long[777] = 3.0;
    long[900] = 3.0;
    assert_eq!(sample(&long, &greedy(), NOTHING), 777);
    assert_eq!(sample(&[-0.0, 0.0], &greedy(), NOTHING), 0);
    assert_eq!(sample(&[f32::NAN, -5.0, f32::INFINITY, f32::INFINITY], &greedy(), NOTHING), 2);
}

#[test]
fn rows_without_a_number_give_a_defined_id() {
    let (inf, nan) = (f32::NEG_INFINITY, f32::NAN);
    for base in [greedy(), sampling(), Sampling { top_k: 2, top_p: 0.5, min_p: 0.1, ..sampling() }] {
        assert_eq!(sample(&[nan, inf, nan], &base, NOTHING), 0);
        assert_eq!(sample(&[], &base, NOTHING), 0);
        let stops = Sampling { min_tokens: 1, stop_token_ids: vec![0, 1, 9], ..base.clone() };
        assert_eq!(sample(&[nan, 5.0, inf, nan], &stops, NOTHING), 2);
        assert_eq!(sample(&[1.0, 2.0], &stops, NOTHING), 0);
        assert_eq!(sample(&[nan, inf, -1e38, nan], &base, NOTHING), 2);
    }
}

#[test]
fn min_tokens_holds_every_stop_id_back_and_not_a_token_longer() {
    for base in [greedy(), Sampling { temperature: 0.1, ..sampling() }] {
        let sampling = Sampling { min_tokens: 2, stop_token_ids: vec![0, 2], ..base };
        let chosen = |output: &[u32]| sample(&[50.0, 0.0, 40.0], &sampling, Tokens { prompt: &[1, 1, 1], output });
        assert_eq!(chosen(&[]), 1);
        assert_eq!(chosen(&[1]), 1);
        assert_eq!(chosen(&[1, 1]), 0);
    }
}

#[test]
fn penalties_count_as_documented() {
    let mut logits = vec![2.0, 2.0, -2.0, -2.0, 2.0, -2.0];
    let sampling = Sampling { repetition_penalty: 2.0, presence_penalty: 0.5, frequency_penalty: 0.25, ..greedy() };
    // 0 and 2 in the prompt (twice: no difference), 1 and 3 in the output (3 twice), ids outside the row nowhere.
    Sampler::new(6).penalize(&mut logits, &sampling, Tokens { prompt: &[0, 2, 0, 99], output: &[3, 1, 3, 99] });
    assert_eq!(logits, [1.0, 1.0 - 0.75, -4.0, -4.0 - 1.0, 2.0, -2.0]);
}

#[test]
fn presence_and_frequency_leave_the_prompt_alone() {
    let mut logits = vec![2.0; 3];
    let sampling = Sampling { presence_penalty: -1.0, frequency_penalty: 0.5, ..greedy() };
    let mut sampler = Sampler::new(3);
    sampler.penalize(&mut logits, &sampling, Tokens { prompt: &[0, 0, 1], output: &[1, 1, 1] });
    assert_eq!(logits, [2.0, 2.0 + 1.0 - 1.5, 2.0]);
    // What one row's history left behind is no part of the next row's.
    let mut next = vec![2.0; 3];
    sampler.penalize(&mut next, &sampling, Tokens { prompt: &[], output: &[2] });
    assert_eq!(next, [2.0, 2.0, 2.5]);
}

#[test]
fn stamps_that_run_out_start_afresh() {
    let mut sampler = Sampler::new(2);
    let sampling = Sampling { presence_penalty: 1.0, ..greedy() };
    let mut step = |stamp: u32, output: &[u32]| {
        sampler.stamp = stamp;
        let mut logits = vec![0.0; 2];
        sampler.penalize(&mut logits, &sampling, Tokens { prompt: &[], output });
        logits
    };
    assert_eq!(step(0, &[0]), [-1.0, 0.0]);
    assert_eq!(step(u32::MAX, &[1]), [0.0, -1.0]);
    assert_eq!(step(0, &[1]), [0.0, -1.0]);
}

/// Probability of each token, in f64 and the plain way; None where a border is too close to call in f32.
fn oracle(logits: &[f32], sampling: &Sampling) -> Option<Vec<f64>> {
    let mut order: Vec<usize> = (0..logits.len()).filter(|&id| logits[id] > f32::NEG_INFINITY).collect();
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
    if sampling.top_k > 0 {
        order.truncate(sampling.top_k as usize);
    }
    let top = f64::from(logits[order[0]]);
    let weight = |id: usize| ((f64::from(logits[id]) - top) / f64::from(sampling.temperature)).exp();
    let close = |a: f64, b: f64| (a - b).abs() < 1e-5 * b.abs();
    if sampling.top_p < 1.0 {
        let mass: f64 = order.iter().map(|&id| weight(id)).sum();
        let needed = mass * f64::from(sampling.top_p);
        let mut sum = 0.0;
        let mut count = 0;
        while count < order.len() && sum < needed {
            sum += weight(order[count]);
            count += 1;
            if close(sum, needed) {
                return None;
            }
        }
        order.truncate(count);
    }
    let least = f64::from(sampling.min_p);
    if order.iter().any(|&id| close(weight(id), least)) {
        return None;
    }
    order.retain(|&id| weight(id) >= least);
    let mass: f64 = order.iter().map(|&id| weight(id)).sum();
    let mut probabilities = vec![0.0; logits.len()];
    order.iter().for_each(|&id| probabilities[id] = weight(id) / mass);
    Some(probabilities)
}

fn logit() -> impl Strategy<Value = f32> {
    prop_oneof![8 => -8f32..8.0, 1 => Just(1.0f32), 1 => Just(f32::NEG_INFINITY), 1 => Just(f32::NAN)]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]
    #[test]
    fn draws_have_the_oracles_probabilities(
        logits in prop_oneof![proptest::collection::vec(logit(), 1..12), proptest::collection::vec(logit(), 250..800)],
        temperature in prop_oneof![0.05f32..3.0, Just(100.0)],
        top_k in prop_oneof![Just(0u32), 1u32..10, 10u32..1000],
        top_p in prop_oneof![Just(1.0f32), 0.01f32..1.0],
        min_p in prop_oneof![Just(0.0f32), 0.001f32..1.0],
    ) {
        let sampling = Sampling { temperature, top_k, top_p, min_p, ..sampling() };
        let (_, top) = best(&logits);
        prop_assume!(top > f32::NEG_INFINITY);
        let Some(expected) = oracle(&logits, &sampling) else { return Err(TestCaseError::reject("a border too close to call")) };
        // Draws on a grid measure the stretch of [0, 1) each token has; the ends of a stretch may miss a point each.
        const GRID: u32 = 500;
        let mut counts = vec![0u32; logits.len()];
        let mut sampler = Sampler::new(logits.len());
        for point in 0..GRID {
            let id = sampler.draw(&logits, top, &sampling, f64::from(point) / f64::from(GRID));
            counts[id as usize] += 1;
        }
        for (id, &probability) in expected.iter().enumerate() {
            let off = f64::from(counts[id]) - probability * f64::from(GRID);
            prop_assert!(off.abs() <= 1.01, "token {}: {} of {GRID}, expected probability {}", id, counts[id], probability);
            prop_assert!(probability > 0.0 || counts[id] == 0, "token {} must not be drawn", id);
        }
        // The very last draw there is.
        let last = sampler.draw(&logits, top, &sampling, 1.0 - f64::EPSILON / 2.0);
        prop_assert!(expected[last as usize] > 0.0);
    }

    #[test]
    fn nothing_panics_and_no_nan_is_drawn(
        bits in proptest::collection::vec(any::<u32>(), 1..300),
        history in proptest::collection::vec(0u32..400, 0..20),
        temperature in prop_oneof![Just(0.0f32), Just(f32::MIN_POSITIVE), Just(1e-45f32), 0f32..100.0],
        top_k: u32, top_p in 1e-30f32..=1.0, min_p in 0f32..=1.0,
        repetition_penalty in 1e-30f32..10.0, presence_penalty in -10f32..10.0, frequency_penalty in -10f32..10.0,
    ) {
        let logits: Vec<f32> = bits.iter().map(|&b| f32::from_bits(b)).collect();
        let sampling = Sampling {
            temperature, top_k: top_k % 512, top_p, min_p, repetition_penalty, presence_penalty, frequency_penalty,
            min_tokens: 10, stop_token_ids: vec![0, 5, 500], ..sampling()
        };
        let (prompt, output) = history.split_at(history.len() / 2);
        let mut row = logits.clone();
        let id = Sampler::new(logits.len()).sample(&mut row, &sampling, Tokens { prompt, output }) as usize;
        prop_assert!(id < logits.len());
        let drawable = |l: f32| l > f32::NEG_INFINITY;
        prop_assert!(drawable(row[id]) || !row.iter().any(|&l| drawable(l)));
        prop_assert!(output.len() >= 10 || !sampling.stop_token_ids.contains(&(id as u32)) || logits.len() == 1);
    }

    #[test]
    fn neighbours_and_what_was_drawn_before_make_no_difference(
        rows in proptest::collection::vec(proptest::collection::vec(-5f32..5.0, 300), 2..6), seed: u64,
    ) {
        let sampling = |row: usize| Sampling {
            seed, top_p: [1.0, 0.9][row % 2], top_k: [0, 40, 0][row % 3], repetition_penalty: [1.0, 1.3][row % 2], ..sampling()
        };
        let history = Tokens { prompt: &[1, 2, 3], output: &[4, 4, 5] };
        let mut shared = Sampler::new(300);
        for (n, row) in rows.iter().enumerate() {
            let together = shared.sample(&mut row.clone(), &sampling(n), history);
            prop_assert_eq!(together, sample(row, &sampling(n), history));
        }
    }
}

#[test]
fn seeded_draws_have_the_distribution() {
    let probabilities = [0.35, 0.25, 0.15, 0.1, 0.08, 0.04, 0.02, 0.01f64];
    let logits: Vec<f32> = probabilities.iter().map(|p| p.ln() as f32).collect();
    const DRAWS: usize = 20_000;
    let output = vec![0; DRAWS];
    let mut sampler = Sampler::new(8);
    // The plain draw and the one over candidates; neither leaves anything out here.
    for (min_p, seed) in [(0.0, 1), (0.0, 2), (1e-6, 3)] {
        let sampling = Sampling { seed, min_p, ..sampling() };
        let mut counts = [0u32; 8];
        for position in 0..DRAWS {
            let history = Tokens { prompt: &[], output: &output[..position] };
            counts[sampler.sample(&mut logits.clone(), &sampling, history) as usize] += 1;
        }
        let chi_square: f64 = counts
            .iter()
            .zip(probabilities)
            .map(|(&count, p)| {
                let expected = p * DRAWS as f64;
                (f64::from(count) - expected).powi(2) / expected
            })
            .sum();
        // 7 degrees of freedom: above 24.3 once in a thousand, below 0.6 once in a thousand.
        assert!((0.6..24.3).contains(&chi_square), "seed {seed}: {chi_square} {counts:?}");
    }
}

#[test]
fn scratch_space_is_taken_once() {
    let size = 5000;
    let mut sampler = Sampler::new(size);
    let space = |s: &Sampler| (s.candidates.capacity(), s.seen.capacity(), s.masses.capacity());
    let before = space(&sampler);
    let flat = vec![0.0; size];
    let kinds = [(0, 1.0, 0.0), (3000, 1.0, 0.0), (40, 0.9, 0.1), (0, 0.999, 0.0), (0, 1.0, 0.5), (4999, 0.5, 0.0)];
    for (top_k, top_p, min_p) in kinds {
        let sampling = Sampling { top_k, top_p, min_p, repetition_penalty: 1.1, ..sampling() };
        sampler.sample(&mut flat.clone(), &sampling, Tokens { prompt: &[1], output: &[2] });
    }
    assert_eq!(space(&sampler), before);
}
