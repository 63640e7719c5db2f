//! Where a text consists of parts of another one, of which only hashes of its blocks are known: the search of rsync
//! (A. Tridgell, "Efficient Algorithms for Sorting and Synchronization", 1999, chapter 3).

use std::collections::HashMap;

use ahash::RandomState;

use crate::record::Part;

/// Bytes of a block.
pub(super) const BLOCK: usize = 256;
/// Token ids of a block.
pub(super) const IDS: usize = 64;
/// Of a text that has changed beyond this, only the beginning is searched.
const MAX_SEARCHED: usize = 4 << 20;
/// Blocks with the same sum that are looked at.
const ALIKE: usize = 4;
/// No block.
const NONE: u32 = u32::MAX;

/// Hashes of the whole blocks of a text.
#[derive(Debug)]
pub(super) struct Signature {
    /// That nobody outside can foresee.
    hashes: Vec<u64>,
    /// That can be moved on by a byte.
    sums: Vec<u32>,
}

impl Signature {
    pub(super) fn of(text: &[u8], hasher: &RandomState) -> Self {
        let blocks = || text.chunks_exact(BLOCK);
        Self {
            hashes: blocks().map(|block| hasher.hash_one(block)).collect(),
            sums: blocks().map(|block| Rolling::of(block).sum()).collect(),
        }
    }

    pub(super) fn memory_bytes(&self) -> usize {
        12 * self.hashes.len()
    }

    /// First bytes that two texts share, in whole blocks.
    pub(super) fn same(&self, other: &Self) -> usize {
        BLOCK * same(&self.hashes, &other.hashes)
    }

    /// The parts of `text` that are in the text of which this is the signature. `own` is the signature of `text`.
    pub(super) fn parts(&self, own: &Self, text: &[u8], hasher: &RandomState) -> Vec<Part> {
        if u32::try_from(text.len()).is_err() || u32::try_from(BLOCK * self.sums.len()).is_err() {
            return vec![];
        }
        let first = self.same(own);
        let mut parts = Parts::default();
        if first > 0 {
            parts.push(0, 0, first);
        }
        // The first block of each sum, and of each block the next with the same one.
        let mut heads: HashMap<u32, u32, RandomState> = HashMap::default();
        let mut next: Vec<u32> = vec![NONE; self.sums.len()];
        for block in (first / BLOCK..self.sums.len()).rev() {
            let after = heads.insert(self.sums[block], block as u32);
            next[block] = after.unwrap_or(NONE);
        }
        let end = text.len().min(first + MAX_SEARCHED);
        let mut at = first;
        let mut rolling = None;
        while !heads.is_empty() && at + BLOCK <= end {
            let window = &text[at..at + BLOCK];
            let sum = rolling.get_or_insert_with(|| Rolling::of(window)).sum();
            let found = heads.get(&sum).and_then(|head| {
                let hash = hasher.hash_one(window);
                let after = |block: &u32| Some(next[*block as usize]).filter(|block| *block != NONE);
                let alike = std::iter::successors(Some(*head), after).take(ALIKE);
                let alike = alike.map(|block| block as usize);
                // The one behind the last part makes it longer.
                let follows = parts.next_from() / BLOCK;
                let follows = Some(follows).filter(|block| self.sums.get(*block) == Some(&sum));
                follows.into_iter().chain(alike).find(|block| self.hashes[*block] == hash)
            });
            if let Some(block) = found {
                parts.push(at, block * BLOCK, BLOCK);
                at += BLOCK;
                rolling = None;
            } else {
                if let (Some(rolling), Some(next)) = (&mut rolling, text.get(at + BLOCK)) {
                    rolling.roll(text[at], *next);
                }
                at += 1;
            }
        }
        of_characters(parts.0, text)
    }
}

/// How many first elements are equal.
pub(super) fn same<T: PartialEq>(a: &[T], b: &[T]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

/// Hashes of the whole blocks of token ids.
pub(super) fn ids(ids: &[u32], hasher: &RandomState) -> Vec<u64> {
    ids.chunks_exact(IDS).map(|block| hasher.hash_one(block)).collect()
}

/// Makes parts longer where bytes around them are equal too.
pub(super) fn extend(mut parts: Vec<Part>, source: &[u8], text: &[u8]) -> Vec<Part> {
    let mut before = 0;
    for index in 0..parts.len() {
        let next = parts.get(index + 1).map_or(text.len(), |part| part.at as usize);
        let part = &mut parts[index];
        let (at, from, length) = (part.at as usize, part.from as usize, part.length as usize);
        let behind = text[at + length..next].iter().zip(&source[from + length..]);
        let behind = behind.take_while(|(a, b)| a == b).count();
        let ahead = text[before..at].iter().rev().zip(source[..from].iter().rev());
        let ahead = ahead.take_while(|(a, b)| a == b).count();
        *part = part_of(at - ahead, from - ahead, ahead + length + behind);
        before = at + length + behind;
    }
    of_characters(parts, text)
}

fn part_of(at: usize, from: usize, length: usize) -> Part {
    Part { at: at as u32, from: from as u32, length: length as u32 }
}

#[derive(Default)]
struct Parts(Vec<Part>);

impl Parts {
    /// Where the last part ends in the other text.
    fn next_from(&self) -> usize {
        self.0.last().map_or(0, |part| (part.from + part.length) as usize)
    }

    fn push(&mut self, at: usize, from: usize, length: usize) {
        if let Some(last) = self.0.last_mut()
            && (last.at + last.length) as usize == at
            && (last.from + last.length) as usize == from
        {
            last.length += length as u32;
        } else {
            self.0.push(part_of(at, from, length));
        }
    }
}

/// No part begins or ends within a character, so that what is kept of the text is text.
fn of_characters(mut parts: Vec<Part>, text: &[u8]) -> Vec<Part> {
    let is_inside = |at: u32| text.get(at as usize).is_some_and(|byte| byte & 0xC0 == 0x80);
    for part in &mut parts {
        while part.length > 0 && is_inside(part.at) {
            *part = Part { at: part.at + 1, from: part.from + 1, length: part.length - 1 };
        }
        while part.length > 0 && is_inside(part.at + part.length) {
            part.length -= 1;
        }
    }
    parts.retain(|part| part.length > 0);
    parts
}

/// The sum of a window that moves: that of its bytes, and that of those sums (Tridgell, 3.1).
struct Rolling {
    low: u32,
    high: u32,
}

impl Rolling {
    /// Of a window of a block's length.
    fn of(window: &[u8]) -> Self {
        let (mut low, mut high) = (0_u32, 0_u32);
        for (at, byte) in window.iter().enumerate().take(BLOCK) {
            low += u32::from(*byte);
            high += (BLOCK - at) as u32 * u32::from(*byte);
        }
        Self { low, high }
    }

    fn roll(&mut self, gone: u8, new: u8) {
        self.low = self.low.wrapping_sub(gone.into()).wrapping_add(new.into());
        let gone = (BLOCK as u32).wrapping_mul(gone.into());
        self.high = self.high.wrapping_sub(gone).wrapping_add(self.low);
    }

    const fn sum(&self) -> u32 {
        (self.low & 0xFFFF) | self.high << 16
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A text with these pieces of other texts.
    fn texts() -> impl Strategy<Value = (String, String)> {
        let piece = prop_oneof![
            4 => "[a-c]{1,300}",
            2 => "(é|𝄞|a){1,300}",
            1 => Just("same ".repeat(200)),
        ];
        let pieces = prop::collection::vec(piece, 1..8);
        (pieces.clone(), pieces, prop::collection::vec((any::<bool>(), 0_usize..8), 1..10)).prop_map(
            |(a, b, order)| {
                let pick = |(is_a, at): &(bool, usize)| {
                    let from = if *is_a { &a } else { &b };
                    from[at % from.len()].clone()
                };
                (a.concat(), order.iter().map(pick).collect())
            },
        )
    }

    fn check(parts: &[Part], source: &str, text: &str) {
        let mut before = 0;
        for part in parts {
            let (at, from, length) = (part.at as usize, part.from as usize, part.length as usize);
            assert!(at >= before && length > 0);
            assert_eq!(&text[at..at + length], &source[from..from + length]);
            before = at + length;
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(300))]

        #[test]
        fn parts_are_parts((source, text) in texts()) {
            let hasher = RandomState::new();
            let [known, own] = [&source, &text].map(|text| Signature::of(text.as_bytes(), &hasher));
            let parts = known.parts(&own, text.as_bytes(), &hasher);
            check(&parts, &source, &text);
            let short: u32 = parts.iter().map(|part| part.length).sum();
            let parts = extend(parts, source.as_bytes(), text.as_bytes());
            check(&parts, &source, &text);
            prop_assert!(short <= parts.iter().map(|part| part.length).sum());
        }
    }

    #[test]
    fn blocks_are_found_wherever_they_are() {
        let hasher = RandomState::new();
        let source: String = (0..4000).map(|n| format!("{n} ")).collect();
        for (head, tail) in [("", "new"), ("other first words: ", ""), ("a", "b")] {
            let text = format!("{head}{}{tail}{}{head}", &source[..5000], &source[9000..]);
            let [known, own] = [&source, &text].map(|text| Signature::of(text.as_bytes(), &hasher));
            let parts = known.parts(&own, text.as_bytes(), &hasher);
            let found: u32 = parts.iter().map(|part| part.length).sum();
            let lost = text.len() - found as usize;
            assert!(lost < head.len() * 2 + tail.len() + 4 * BLOCK, "{lost}");
            let parts = extend(parts, source.as_bytes(), text.as_bytes());
            let found: u32 = parts.iter().map(|part| part.length).sum();
            assert!(text.len() - found as usize <= head.len() * 2 + tail.len(), "{parts:?}");
        }
    }

    #[test]
    fn texts_of_equal_blocks_are_searched_too() {
        let hasher = RandomState::new();
        let source = "x".repeat(20_000);
        let text = format!("a{}b{}", "y".repeat(500), "x".repeat(30_000));
        let [known, own] = [&source, &text].map(|text| Signature::of(text.as_bytes(), &hasher));
        let parts = known.parts(&own, text.as_bytes(), &hasher);
        check(&parts, &source, &text);
        let found: u32 = parts.iter().map(|part| part.length).sum();
        assert!(found as usize > 30_000 - 2 * BLOCK, "{parts:?}");
    }

    #[test]
    fn a_sum_moves_on_as_if_it_were_made_anew() {
        let text: Vec<u8> = (0..2000_u32).map(|n| (n * 7919 % 251) as u8).collect();
        let mut rolling = Rolling::of(&text[..BLOCK]);
        for at in 1..text.len() - BLOCK {
            rolling.roll(text[at - 1], text[at - 1 + BLOCK]);
            assert_eq!(rolling.sum(), Rolling::of(&text[at..at + BLOCK]).sum());
        }
    }
}
