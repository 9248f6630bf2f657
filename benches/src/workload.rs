//! Requests that benchmarks share.

use llmd_protocol::message::{GenerateRequest, Prompt};
use llmd_tests::load::Mix;
use llmd_tests::tiny_model::Random;
use std::ops::RangeInclusive;

/// Prompts are made of ids from here up to below any real vocabulary's end: ordinary words, no special tokens.
pub const IDS: RangeInclusive<u32> = 1000..=30_000;

/// Request `number` of seed `seed`, of exactly these lengths.
pub fn exactly(seed: u64, number: u64, prompt: u32, output: u32) -> GenerateRequest {
    let (prompt_tokens, output_tokens) = (prompt..=prompt, output..=output);
    Mix { seed, prompt_tokens, output_tokens, ids: IDS, temperature: 0.0 }.request(number)
}

/// Prompts and outputs of these lengths, short ones more often than long ones: uniform in the logarithm.
pub fn mixed(
    seed: u64,
    count: u64,
    prompts: RangeInclusive<u32>,
    outputs: RangeInclusive<u32>,
) -> Vec<GenerateRequest> {
    let mut random = Random(seed);
    let mut log_uniform = |range: &RangeInclusive<u32>| {
        let (low, high) = (f64::from(*range.start()), f64::from(*range.end()));
        let share = random.between(0, 1 << 20) as f64 / f64::from(1 << 20);
        (low * (high / low).powf(share)).round() as u32
    };
    (0..count)
        .map(|number| {
            let prompt = log_uniform(&prompts);
            exactly(seed, number, prompt, log_uniform(&outputs))
        })
        .collect()
}

/// Puts the same `tokens` ids before every prompt.
pub fn share_prefix(seed: u64, tokens: usize, requests: &mut [GenerateRequest]) {
    let mut random = Random(seed);
    let shared: Vec<u32> = (0..tokens).map(|_| random.between(*IDS.start(), *IDS.end())).collect();
    for request in requests {
        if let Prompt::Tokens(prompt) = &mut request.prompt {
            prompt.splice(0..0, shared.iter().copied());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prompt(request: &GenerateRequest) -> &[u32] {
        let Prompt::Tokens(prompt) = &request.prompt else { panic!("prompts are ids here") };
        prompt
    }

    #[test]
    fn lengths_stay_in_their_ranges_and_the_seed_decides() {
        let requests = mixed(7, 200, 16..=512, 16..=256);
        assert_eq!(requests, mixed(7, 200, 16..=512, 16..=256));
        assert_ne!(requests, mixed(8, 200, 16..=512, 16..=256));
        assert!(requests.iter().all(|r| (16..=512).contains(&prompt(r).len())));
        assert!(requests.iter().all(|r| (16..=256).contains(&r.sampling.max_tokens) && r.sampling.ignore_eos));
        let short = requests.iter().filter(|r| prompt(r).len() < 91).count();
        assert!((70..130).contains(&short), "half are below the geometric mean: {short}");
    }

    #[test]
    fn a_shared_prefix_is_the_same_in_all_and_the_rest_stays() {
        let own = mixed(7, 3, 16..=32, 1..=2);
        let mut requests = own.clone();
        share_prefix(9, 256, &mut requests);
        for (request, own) in requests.iter().zip(&own) {
            assert_eq!(prompt(request)[..256], prompt(&requests[0])[..256]);
            assert_eq!(prompt(request)[256..], *prompt(own));
        }
    }
}
