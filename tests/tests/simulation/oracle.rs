//! A model without weights: what a request's output must be, worked out from the request alone.

use llmd::scheduler::SchedulerSettings;
use llmd::sequence::{FinishReason, NewSequence, Sampling};

/// Token ids are below this: few, so that prompts and outputs meet again and stop ids are hit.
pub const VOCABULARY: u64 = 40;

/// A reproducible stream of numbers (SplitMix64).
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        mix(self.0)
    }

    /// A number in `0..bound`.
    pub fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    /// A number in `least..=most`.
    pub fn within(&mut self, least: usize, most: usize) -> usize {
        least + self.below(most - least + 1)
    }

    /// True once in `n` times.
    pub fn once_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    pub fn tokens(&mut self, n: usize) -> Vec<u32> {
        (0..n).map(|_| (self.next() % VOCABULARY) as u32).collect()
    }
}

/// The finaliser of SplitMix64: every input bit moves every output bit.
pub fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

/// What stands in a key-value slot: it names the salt and every token up to its position.
pub fn content(salt: u64, before: Option<u64>, token: u32) -> u64 {
    mix(before.unwrap_or(mix(salt ^ 0x5A17)) ^ u64::from(token).wrapping_mul(0x2545_F491_4F6C_DD1D)) | 1
}

/// The token that follows, from what the attention reads and the sample's number.
pub fn next_token(last_content: u64, seed: u64, output_len: usize) -> u32 {
    (mix(last_content ^ mix(seed) ^ output_len as u64) % VOCABULARY) as u32
}

/// How a request must end, and with which output, whatever company it has.
pub fn alone(new: &NewSequence, settings: &SchedulerSettings) -> (Vec<u32>, FinishReason) {
    let NewSequence { prompt, sampling, cache_salt } = new;
    let mut last = None;
    for &token in prompt {
        last = Some(content(*cache_salt, last, token));
    }
    let positions = settings.usable_blocks() * 16;
    let mut output = Vec::new();
    loop {
        let len = prompt.len() + output.len();
        if output.len() == sampling.max_tokens as usize || len == settings.context_max {
            return (output, FinishReason::Length);
        }
        if len > positions {
            return (output, FinishReason::KvExhausted);
        }
        let token = next_token(last.expect("prompts are not empty"), sampling.seed, output.len());
        output.push(token);
        last = Some(content(*cache_salt, last, token));
        if sampling.stop_token_ids.contains(&token) && output.len() > sampling.min_tokens as usize {
            return (output, FinishReason::Stop);
        }
    }
}

/// Greedy-looking parameters that end after `max_tokens`.
pub fn sampling(max_tokens: u32) -> Sampling {
    Sampling { seed: 1, ..Sampling::greedy(max_tokens) }
}

/// A request of its own prompt (drawn from `name`) and salt 0.
pub fn request(name: u64, prompt_len: usize, max_tokens: u32) -> NewSequence {
    NewSequence { prompt: Random(name).tokens(prompt_len), sampling: sampling(max_tokens), cache_salt: 0 }
}
