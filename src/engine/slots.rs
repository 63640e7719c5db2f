//! Which slot of the K/V cache holds what, and what a new prompt can take over.

/// A prompt waits for a running one that reads the same beginning when that saves at least this many tokens.
const WORTH_WAITING: usize = 32;

/// Tokens of one slot of the cache.
#[derive(Debug, Default)]
pub(super) struct Slot {
    /// Prompt and sampled tokens.
    pub sequence: Vec<u32>,
    /// How many of them have keys and values in the cache.
    pub cached: usize,
    pub is_running: bool,
    /// When it was last used, by the scheduler's clock; 0 is never.
    pub last_used: u64,
}

/// Where a new prompt goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Placement {
    /// A running prompt will soon have read the same tokens.
    Wait,
    /// Into `slot`; its first `len` tokens come from slot `from`, which may be `slot` itself.
    Slot { slot: usize, from: usize, len: usize },
}

/// Decides where `prompt` goes. `None` when all slots run.
pub(super) fn place(slots: &[Slot], prompt: &[u32], reuse: bool) -> Option<Placement> {
    // The last token of a prompt is always read: its logits are needed.
    let usable = if reuse { prompt.len() - 1 } else { 0 };
    let shared = |slot: &Slot| -> usize {
        slot.sequence.iter().zip(&prompt[..usable]).take_while(|(held, wanted)| held == wanted).count()
    };
    let (mut from, mut len, mut coming) = (0, 0, 0);
    for (index, slot) in slots.iter().enumerate() {
        let all = shared(slot);
        let ready = all.min(slot.cached);
        if ready > len || (ready == len && ready > 0 && !slot.is_running && slots[from].is_running) {
            (from, len) = (index, ready);
        }
        if slot.is_running {
            coming = coming.max(all);
        }
    }
    let oldest = slots
        .iter()
        .enumerate()
        .filter(|(index, slot)| !slot.is_running && (*index != from || len == 0))
        .min_by_key(|(_, slot)| slot.last_used)
        .map(|(index, _)| index);
    let can_extend = len > 0 && !slots[from].is_running && len == slots[from].cached;
    let slot = match oldest {
        _ if can_extend => from,
        Some(oldest) => oldest,
        None if len > 0 && !slots[from].is_running => from,
        None => return None,
    };
    if coming >= len + WORTH_WAITING {
        return Some(Placement::Wait);
    }
    Some(Placement::Slot { slot, from: if len == 0 { slot } else { from }, len })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slot(sequence: &[u32], cached: usize, is_running: bool, last_used: u64) -> Slot {
        Slot { sequence: sequence.to_vec(), cached, is_running, last_used }
    }

    #[test]
    fn a_next_turn_takes_over_its_slot() {
        let slots = [Slot::default(), slot(&[1, 2, 3, 4], 3, false, 5)];
        let placed = place(&slots, &[1, 2, 3, 4, 9], true);
        assert_eq!(placed, Some(Placement::Slot { slot: 1, from: 1, len: 3 }));
        let placed = place(&slots, &[1, 2, 3, 4, 9], false);
        assert_eq!(placed, Some(Placement::Slot { slot: 0, from: 0, len: 0 }));
    }

    #[test]
    fn a_fork_copies_and_leaves_its_source() {
        let slots = [slot(&[7], 1, false, 9), slot(&[1, 2, 3, 4], 4, false, 5), slot(&[8], 1, false, 4)];
        let placed = place(&slots, &[1, 2, 9], true);
        assert_eq!(placed, Some(Placement::Slot { slot: 2, from: 1, len: 2 }));
        let running = [slot(&[1, 2, 3, 4], 4, true, 5), slot(&[8], 1, false, 4)];
        assert_eq!(place(&running, &[1, 2, 9], true), Some(Placement::Slot { slot: 1, from: 0, len: 2 }));
    }

    #[test]
    fn the_last_prompt_token_is_always_read() {
        let slots = [slot(&[1, 2, 3], 3, true, 1), Slot::default()];
        assert_eq!(place(&slots, &[1, 2, 3], true), Some(Placement::Slot { slot: 1, from: 0, len: 2 }));
        assert_eq!(place(&slots, &[1], true), Some(Placement::Slot { slot: 1, from: 1, len: 0 }));
    }

    #[test]
    fn a_prompt_waits_for_one_that_reads_the_same() {
        let long: Vec<u32> = (0..100).collect();
        let slots = [slot(&long, 10, true, 1), Slot::default()];
        assert_eq!(place(&slots, &long, true), Some(Placement::Wait));
        let slots = [slot(&long, 90, true, 1), Slot::default()];
        assert_eq!(place(&slots, &long, true), Some(Placement::Slot { slot: 1, from: 0, len: 90 }));
        assert_eq!(place(&[slot(&long, 90, true, 1)], &long, true), None);
    }

    #[test]
    fn the_only_free_slot_is_cut_back_when_it_is_the_source() {
        let slots = [slot(&[1, 2, 3, 4], 4, false, 5)];
        assert_eq!(place(&slots, &[1, 2, 9], true), Some(Placement::Slot { slot: 0, from: 0, len: 2 }));
    }
}
