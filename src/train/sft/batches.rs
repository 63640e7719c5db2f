//! Order of the conversations: shuffled, with rows of like length together.

use crate::train::rng::Rng;

/// Batches that are sorted by length together before they are cut.
const BUCKET: usize = 8;

/// An endless sequence of batches over items with the given lengths: epoch after epoch, each item once an epoch.
///
/// Of every stretch of eight batches the items are sorted by length, cut into batches, and the batches shuffled.
#[derive(Debug)]
pub(super) struct Batches {
    lengths: Vec<usize>,
    batch_size: usize,
    rng: Rng,
    /// Items of this epoch not yet in a batch, last first.
    order: Vec<usize>,
    /// Batches ready to hand out, last first.
    ready: Vec<Vec<usize>>,
}

impl Batches {
    /// `lengths` is not empty and `batch_size` not 0.
    pub fn new(lengths: Vec<usize>, batch_size: usize, seed: u64) -> Self {
        Self { lengths, batch_size, rng: Rng::new(seed, 1), order: Vec::new(), ready: Vec::new() }
    }

    /// Indices of the next batch.
    pub fn next_batch(&mut self) -> Vec<usize> {
        loop {
            if let Some(batch) = self.ready.pop() {
                return batch;
            }
            if self.order.is_empty() {
                self.order = (0..self.lengths.len()).collect();
                self.rng.shuffle(&mut self.order);
            }
            let rest = self.order.len().saturating_sub(self.batch_size * BUCKET);
            let mut bucket = self.order.split_off(rest);
            bucket.sort_by_key(|&item| (self.lengths[item], item));
            self.ready = bucket.chunks(self.batch_size).map(<[usize]>::to_vec).collect();
            self.rng.shuffle(&mut self.ready);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Batches;

    #[test]
    fn every_item_comes_once_an_epoch_and_the_seed_decides_the_order() {
        let lengths: Vec<usize> = (0..100).map(|i| (i * 37) % 50).collect();
        let epoch = |seed| {
            let mut batches = Batches::new(lengths.clone(), 4, seed);
            (0..25).map(|_| batches.next_batch()).collect::<Vec<_>>()
        };
        let mut items: Vec<usize> = epoch(3).concat();
        items.sort_unstable();
        assert_eq!(items, (0..100).collect::<Vec<_>>());
        assert_eq!(epoch(3), epoch(3));
        assert_ne!(epoch(3), epoch(4));
        let is_wide = |batch: &Vec<usize>| {
            let most = batch.iter().map(|&i| lengths[i]).max();
            let least = batch.iter().map(|&i| lengths[i]).min();
            most.zip(least).is_some_and(|(most, least)| most - least > 20)
        };
        // The last bucket holds what is left over: a single batch of any lengths.
        assert!(epoch(3).iter().filter(|batch| is_wide(batch)).count() <= 1);
    }
}
