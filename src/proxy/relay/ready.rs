//! Bytes for the client, in order. Long pieces are handed on as they are; short ones are joined.

use std::collections::VecDeque;

use bytes::{Bytes, BytesMut};

/// A piece this long is not copied.
const LONG: usize = 64 << 10;

#[derive(Default)]
pub(super) struct Ready {
    pieces: VecDeque<Bytes>,
    /// Behind the pieces.
    last: BytesMut,
}

impl Ready {
    pub(super) fn is_empty(&self) -> bool {
        self.last.is_empty() && self.pieces.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.last.len() + self.pieces.iter().map(Bytes::len).sum::<usize>()
    }

    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }

    /// Makes room for bytes that are about to be pushed.
    pub(super) fn reserve(&mut self, bytes: usize) {
        if bytes < LONG {
            self.last.reserve(bytes);
        }
    }

    pub(super) fn extend_from_slice(&mut self, bytes: &[u8]) {
        self.last.extend_from_slice(bytes);
    }

    /// The same with bytes that may be shared.
    pub(super) fn push(&mut self, piece: Bytes) {
        if piece.len() < LONG {
            return self.last.extend_from_slice(&piece);
        }
        if !self.last.is_empty() {
            self.pieces.push_back(self.last.split().freeze());
        }
        self.pieces.push_back(piece);
    }

    /// Takes all that is in `other`.
    pub(super) fn append(&mut self, other: &mut Self) {
        while !other.is_empty() {
            self.push(other.take());
        }
    }

    /// The next piece; empty if there is none.
    pub(super) fn take(&mut self) -> Bytes {
        self.pieces.pop_front().unwrap_or_else(|| self.last.split().freeze())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_come_out_in_order_and_long_ones_are_not_copied() {
        let long = Bytes::from(vec![b'l'; LONG]);
        let (mut held, mut ready) = (Ready::default(), Ready::default());
        held.extend_from_slice(b"a");
        held.push(Bytes::from_static(b"b"));
        held.push(long.clone());
        held.push(Bytes::from_static(b"c"));
        ready.extend_from_slice(b"0");
        ready.append(&mut held);
        assert!(held.is_empty());
        assert_eq!(ready.len(), LONG + 4);
        assert_eq!(ready.take(), b"0ab".as_slice());
        assert_eq!(ready.take().as_ptr(), long.as_ptr());
        assert_eq!((ready.take().as_ref(), ready.is_empty()), (b"c".as_slice(), true));
        assert!(ready.take().is_empty());
        ready.push(long);
        ready.clear();
        assert_eq!((ready.is_empty(), ready.len()), (true, 0));
    }
}
