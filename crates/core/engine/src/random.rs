//! Random numbers without state: each is a function of a seed and a position. So an answer does not depend on the other
//! requests, on how its prompt was split into chunks, or on whether it was requeued.

use std::hash::{BuildHasher, Hasher, RandomState};

/// A seed that differs from call to call, for requests that give none.
pub fn fresh_seed() -> u64 {
    RandomState::new().build_hasher().finish()
}

/// Uniform in `0..1`.
pub fn uniform(seed: u64, position: u64) -> f64 {
    let [a, b, ..] = philox([position as u32, (position >> 32) as u32, 0, 0], [seed as u32, (seed >> 32) as u32]);
    let bits = u64::from(a) << 32 | u64::from(b);
    // The 53 bits that an f64 holds exactly.
    (bits >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
}

/// Philox4x32-10 (Salmon, Moraes, Dror, Shaw: Parallel random numbers: as easy as 1, 2, 3; 2011).
fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let product = [u64::from(counter[0]) * 0xD251_1F53, u64::from(counter[2]) * 0xCD9E_8D57];
        counter = [
            (product[1] >> 32) as u32 ^ counter[1] ^ key[0],
            product[1] as u32,
            (product[0] >> 32) as u32 ^ counter[3] ^ key[1],
            product[0] as u32,
        ];
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    counter
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn philox_gives_the_published_values() {
        let zeros = [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8];
        assert_eq!(philox([0; 4], [0; 2]), zeros);
        let ones = [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd];
        assert_eq!(philox([u32::MAX; 4], [u32::MAX; 2]), ones);
        let pi = [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1];
        assert_eq!(philox([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344], [0xa409_3822, 0x299f_31d0]), pi);
    }

    #[test]
    fn numbers_fill_the_unit_interval_evenly() {
        let mut bins = [0; 10];
        for position in 0..100_000 {
            let number = uniform(7, position);
            assert!((0.0..1.0).contains(&number));
            bins[(number * 10.0) as usize] += 1;
        }
        // Five standard deviations of a bin's count.
        assert!(bins.iter().all(|&count: &i32| (count - 10_000).abs() < 475), "{bins:?}");
    }

    #[test]
    fn seeds_and_positions_give_unrelated_numbers() {
        assert_ne!(uniform(1, 0), uniform(2, 0));
        assert_ne!(uniform(1, 0), uniform(1, 1));
        assert_ne!(fresh_seed(), fresh_seed());
    }
}
