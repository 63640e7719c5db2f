//! Counted randomness: a number for a seed and a position, whatever else was drawn.

/// Steele, Lea and Flood's finaliser of SplitMix64 ("Fast splittable pseudorandom number generators", 2014).
fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// Uniform in [0, 1), with 53 bits.
pub(super) fn uniform(seed: u64, position: u64) -> f64 {
    let bits = mix(mix(seed) ^ position.wrapping_mul(0xd6e8_feb8_6659_fd93));
    (bits >> 11) as f64 / (1u64 << 53) as f64
}

/// The seed of choice `index` of a request; choice 0 keeps the request's own.
#[must_use]
pub fn derive_seed(seed: u64, index: u64) -> u64 {
    if index == 0 { seed } else { mix(mix(seed).wrapping_add(index)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_uniform_over_seeds_and_over_positions() {
        for by_seed in [false, true] {
            let mut counts = [0u32; 16];
            for index in 0..16_000 {
                let value = if by_seed { uniform(index, 7) } else { uniform(7, index) };
                counts[(value * 16.0) as usize] += 1;
            }
            // 1000 each; five standard deviations are 153.
            assert!(counts.iter().all(|&count| (847..=1153).contains(&count)), "{counts:?}");
        }
    }
}
