//! The journal's bytes: a segment header, then frames. One frame is one `append`: whole or not there.
//!
//! ```text
//! header  "LEGOJRN1" | salt 8 | crc32c(all before) 4
//! frame   marker 4 (first half of the salt) | length 4 | crc32c(salt, length, payload) 4 | payload
//! ```
//! Numbers are little-endian. The salt is random for each segment, so bytes inside a payload (a request body
//! is the harness's to choose) can never pass for a frame when a damaged segment is searched for the next one.

use std::io::{self, Read};

use bytes::Bytes;

pub(super) const HEADER_LEN: usize = 20;
pub(super) const FRAME_HEAD_LEN: usize = 12;
/// Longest payload of one frame.
pub(super) const MAX_PAYLOAD: usize = 1 << 30;
const MAGIC: &[u8; 8] = b"LEGOJRN1";

/// Random bytes that belong to one segment.
pub(super) type Salt = [u8; 8];

pub(super) fn header(salt: Salt) -> [u8; HEADER_LEN] {
    let mut bytes = [0; HEADER_LEN];
    bytes[..8].copy_from_slice(MAGIC);
    bytes[8..16].copy_from_slice(&salt);
    let crc = crc32c::crc32c(&bytes[..16]);
    bytes[16..].copy_from_slice(&crc.to_le_bytes());
    bytes
}

/// The salt, if the header is whole.
pub(super) fn parse_header(bytes: &[u8]) -> Option<Salt> {
    let (head, crc) = bytes.get(..HEADER_LEN)?.split_at(16);
    let is_whole = &head[..8] == MAGIC && crc32c::crc32c(head).to_le_bytes() == *crc;
    is_whole.then(|| head[8..].try_into().ok()).flatten()
}

fn checksum<'a>(salt: Salt, length: [u8; 4], parts: impl IntoIterator<Item = &'a [u8]>) -> u32 {
    let crc = crc32c::crc32c_append(crc32c::crc32c(&salt), &length);
    parts.into_iter().fold(crc, crc32c::crc32c_append)
}

/// What stands before a payload of these parts, which are `length` bytes together and at most [`MAX_PAYLOAD`].
pub(super) fn head<'a>(
    salt: Salt,
    length: usize,
    parts: impl IntoIterator<Item = &'a [u8]>,
) -> [u8; FRAME_HEAD_LEN] {
    let length = u32::try_from(length).expect("at most MAX_PAYLOAD").to_le_bytes();
    let mut head = [0; FRAME_HEAD_LEN];
    head[..4].copy_from_slice(&salt[..4]);
    head[4..8].copy_from_slice(&length);
    head[8..].copy_from_slice(&checksum(salt, length, parts).to_le_bytes());
    head
}

/// What a step through a segment found.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// A whole frame.
    Frame(Bytes),
    /// `bytes` from `at` are damaged; whole frames follow.
    Damage { at: u64, bytes: u64 },
    /// Nothing whole follows `at`; `torn` bytes lie behind it.
    End { at: u64, torn: u64 },
}

/// Reads the frames of one segment in order. `source` stands behind the header.
pub(super) struct Frames<R> {
    source: R,
    salt: Salt,
    /// Offset in the file of the next byte to be parsed.
    at: u64,
    /// The rest of the segment, once damage was met, and how much of it is parsed.
    pending: Option<(Vec<u8>, usize)>,
}

impl<R: Read> Frames<R> {
    pub(super) fn new(source: R, salt: Salt) -> Self {
        Self::at_byte(source, salt, HEADER_LEN as u64)
    }

    /// The same of a source that stands at byte `at` of the file, where a frame begins.
    pub(super) const fn at_byte(source: R, salt: Salt, at: u64) -> Self {
        Self { source, salt, at, pending: None }
    }

    /// Offset in the file of what the next step parses.
    pub(super) const fn at(&self) -> u64 {
        self.at
    }

    pub(super) const fn salt(&self) -> Salt {
        self.salt
    }

    /// The next frame, a damaged stretch, or the end. Frames cost one read each; only damage reads the rest
    /// of the segment into memory.
    pub(super) fn step(&mut self) -> io::Result<Step> {
        if let Some((pending, parsed)) = self.pending.take() {
            return Ok(self.step_pending(pending, parsed));
        }
        let mut seen = Vec::new();
        self.take(FRAME_HEAD_LEN, &mut seen)?;
        if let Some(length) = frame_length(&seen, self.salt) {
            self.take(length, &mut seen)?;
        }
        if whole_frame(&seen, self.salt).is_some() {
            self.at += seen.len() as u64;
            return Ok(Step::Frame(Bytes::from(seen).slice(FRAME_HEAD_LEN..)));
        }
        self.source.read_to_end(&mut seen)?;
        Ok(self.step_pending(seen, 0))
    }

    fn take(&mut self, length: usize, into: &mut Vec<u8>) -> io::Result<()> {
        // A long frame would be moved each time that it outgrows its room. What is not written to takes no memory, so a
        // damaged length does no harm.
        let _ = into.try_reserve_exact(length);
        self.source.by_ref().take(length as u64).read_to_end(into).map(|_| ())
    }

    fn step_pending(&mut self, pending: Vec<u8>, parsed: usize) -> Step {
        let next = (parsed..pending.len()).find_map(|start| {
            let rest = &pending[start..];
            rest.starts_with(&self.salt[..4]).then_some(())?;
            whole_frame(rest, self.salt).map(|payload| (start, Bytes::copy_from_slice(payload)))
        });
        let at = self.at;
        match next {
            None => Step::End { at, torn: (pending.len() - parsed) as u64 },
            Some((start, payload)) if start == parsed => {
                let length = FRAME_HEAD_LEN + payload.len();
                self.at += length as u64;
                self.pending = Some((pending, parsed + length));
                Step::Frame(payload)
            }
            Some((start, _)) => {
                let bytes = (start - parsed) as u64;
                self.at += bytes;
                self.pending = Some((pending, start));
                Step::Damage { at, bytes }
            }
        }
    }
}

/// The payload's length, if `bytes` begins with a frame's head.
fn frame_length(bytes: &[u8], salt: Salt) -> Option<usize> {
    let head = bytes.get(..FRAME_HEAD_LEN)?;
    let length = u32::from_le_bytes(head[4..8].try_into().ok()?) as usize;
    (head[..4] == salt[..4] && length <= MAX_PAYLOAD).then_some(length)
}

/// The payload of these bytes, if they begin with a whole frame.
pub(super) fn whole_payload(bytes: Vec<u8>, salt: Salt) -> Option<Bytes> {
    let length = whole_frame(&bytes, salt)?.len();
    Some(Bytes::from(bytes).slice(FRAME_HEAD_LEN..FRAME_HEAD_LEN + length))
}

fn whole_frame(bytes: &[u8], salt: Salt) -> Option<&[u8]> {
    let length = frame_length(bytes, salt)?;
    let payload = bytes.get(FRAME_HEAD_LEN..FRAME_HEAD_LEN + length)?;
    let crc = checksum(salt, bytes[4..8].try_into().ok()?, [payload]);
    (crc.to_le_bytes() == bytes[8..12]).then_some(payload)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SALT: Salt = *b"saltSALT";

    fn push_frame(out: &mut Vec<u8>, salt: Salt, payload: &[u8]) {
        // In two parts, which make no difference.
        let (one, other) = payload.split_at(payload.len() / 2);
        out.extend_from_slice(&head(salt, payload.len(), [one, other]));
        out.extend_from_slice(payload);
    }

    fn segment(payloads: &[&[u8]]) -> Vec<u8> {
        let mut bytes = Vec::new();
        for payload in payloads {
            push_frame(&mut bytes, SALT, payload);
        }
        bytes
    }

    fn steps(bytes: &[u8]) -> Vec<Step> {
        let mut frames = Frames::new(bytes, SALT);
        let mut found = vec![];
        loop {
            let step = frames.step().expect("memory reads");
            let is_end = matches!(step, Step::End { .. });
            found.push(step);
            if is_end {
                return found;
            }
        }
    }

    #[test]
    fn a_tail_cut_at_any_byte_loses_only_its_own_frame() {
        let bytes = segment(&[b"one", b"", b"three"]);
        let ends = [0, 15, 27, 44];
        for cut in 0..=bytes.len() {
            let whole = ends.iter().filter(|&&end| end <= cut).count() - 1;
            let found = steps(&bytes[..cut]);
            assert_eq!(found.len(), whole + 1, "cut at {cut}");
            let at = (HEADER_LEN + ends[whole]) as u64;
            assert_eq!(found[whole], Step::End { at, torn: (cut - ends[whole]) as u64 });
        }
    }

    #[test]
    fn damage_in_the_middle_costs_only_the_damaged_frames() {
        let clean = segment(&[b"one", b"two", b"three"]);
        for byte in 15..30 {
            let mut bytes = clean.clone();
            bytes[byte] ^= 0x40;
            assert_eq!(
                steps(&bytes),
                vec![
                    Step::Frame(Bytes::from_static(b"one")),
                    Step::Damage { at: HEADER_LEN as u64 + 15, bytes: 15 },
                    Step::Frame(Bytes::from_static(b"three")),
                    Step::End { at: (HEADER_LEN + clean.len()) as u64, torn: 0 },
                ],
                "byte {byte}"
            );
        }
    }

    #[test]
    fn a_frame_of_another_segment_inside_a_payload_is_not_taken_for_one() {
        let mut foreign = Vec::new();
        push_frame(&mut foreign, *b"otherone", b"forged");
        let mut bytes = segment(&[&foreign]);
        bytes.pop();
        assert!(matches!(steps(&bytes)[..], [Step::End { .. }]));
    }

    #[test]
    fn a_header_with_any_flipped_bit_is_refused() {
        let bytes = header(SALT);
        assert_eq!(parse_header(&bytes), Some(SALT));
        for byte in 0..HEADER_LEN {
            let mut bad = bytes;
            bad[byte] ^= 1;
            assert_eq!(parse_header(&bad), None);
        }
    }
}
