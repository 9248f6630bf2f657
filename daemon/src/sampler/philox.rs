//! Philox4x32-10, a random number generator without a state: the number is a function of a key and a counter, so that
//! a draw depends on nothing that was drawn before. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011.

const MULTIPLIERS: [u32; 2] = [0xd251_1f53, 0xcd9e_8d57];
const WEYL: [u32; 2] = [0x9e37_79b9, 0xbb67_ae85];
const ROUNDS: u32 = 10;

/// 128 random bits for this key and counter.
pub fn philox4x32(mut key: [u32; 2], counter: [u32; 4]) -> [u32; 4] {
    let mut c = counter;
    for _ in 0..ROUNDS {
        let low = u64::from(MULTIPLIERS[0]) * u64::from(c[0]);
        let high = u64::from(MULTIPLIERS[1]) * u64::from(c[2]);
        c = [(high >> 32) as u32 ^ c[1] ^ key[0], high as u32, (low >> 32) as u32 ^ c[3] ^ key[1], low as u32];
        key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
    }
    c
}

/// The draw for one token, in [0, 1) with 53 bits: keyed by the request's seed, counted by the token's position in the
/// output and by which of the request's samples it belongs to.
pub fn uniform(seed: u64, position: u64, sample: u32) -> f64 {
    let key = [seed as u32, (seed >> 32) as u32];
    let [a, b, ..] = philox4x32(key, [position as u32, (position >> 32) as u32, sample, 0]);
    let bits = u64::from(a) << 32 | u64::from(b);
    (bits >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The known answers of the authors' own library, Random123 (tests/kat_vectors).
    #[test]
    fn known_answers() {
        assert_eq!(philox4x32([0; 2], [0; 4]), [0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8]);
        assert_eq!(philox4x32([u32::MAX; 2], [u32::MAX; 4]), [0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd]);
        assert_eq!(
            philox4x32([0xa4093822, 0x299f31d0], [0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344]),
            [0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1]
        );
    }

    #[test]
    fn draws_differ_by_seed_position_and_sample_and_lie_in_the_unit_interval() {
        let mut draws = Vec::new();
        for seed in [0, 1, 1 << 32, u64::MAX] {
            for position in [0, 1, 1 << 32] {
                for sample in [0, 1] {
                    draws.push(uniform(seed, position, sample));
                }
            }
        }
        assert!(draws.iter().all(|u| (0.0..1.0).contains(u)));
        draws.sort_by(f64::total_cmp);
        assert!(draws.windows(2).all(|pair| pair[0] < pair[1]));
    }
}
