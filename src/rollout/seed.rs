//! One way to derive a seed from the run's seed and what the seed is for.

/// SplitMix64's finaliser (Steele, Lea, Flood 2014), chained over `parts`: equal parts give equal seeds,
/// and changing any part changes all bits with equal chance.
#[must_use]
pub fn derive_seed(parts: &[u64]) -> u64 {
    parts.iter().fold(0x6C65_676F_2D72_6C00, |state, &part| mix(state ^ mix(part)))
}

fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn order_and_length_of_the_parts_matter() {
        assert_eq!(derive_seed(&[1, 2]), derive_seed(&[1, 2]));
        assert_ne!(derive_seed(&[1, 2]), derive_seed(&[2, 1]));
        assert_ne!(derive_seed(&[1]), derive_seed(&[1, 0]));
    }
}
