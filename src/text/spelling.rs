//! How a vocabulary spells bytes: GPT-2's stand-ins, or SentencePiece's `▁` for a space and `<0x0A>` for a byte.

use std::collections::HashMap;

use serde_json::Value;

/// SentencePiece's space.
const SPACE: &str = "▁";

/// How the pieces of a vocabulary become text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Spelling {
    /// Every character stands for a byte.
    ByteLevel,
    /// A piece is text, in which `▁` is a space; a piece like `<0x0A>` is a byte.
    Pieces {
        /// Spaces that are dropped at the beginning of a text, where encoding puts one in.
        dropped_spaces: usize,
    },
}

impl Spelling {
    /// Reads the decoder of a tokenizer.json; `None` for one that lego does not know exactly.
    pub(super) fn of(decoder: &Value) -> Option<Self> {
        let steps: Vec<&Value> = match decoder["type"].as_str()? {
            "Sequence" => decoder["decoders"].as_array()?.iter().collect(),
            _ => vec![decoder],
        };
        let kinds: Vec<&str> = steps.iter().filter_map(|step| step["type"].as_str()).collect();
        let dropped_spaces = match (&kinds[..], steps.last()) {
            (["ByteLevel"], _) => return Some(Self::ByteLevel),
            (["Replace", "ByteFallback", "Fuse"], _) => 0,
            (["Replace", "ByteFallback", "Fuse", "Strip"], Some(strip)) => {
                let drops_only_spaces_before = strip["content"] == " " && strip["stop"] == 0;
                usize::try_from(strip["start"].as_u64()?).ok().filter(|_| drops_only_spaces_before)?
            }
            _ => return None,
        };
        let is_space = steps[0]["pattern"]["String"] == SPACE && steps[0]["content"] == " ";
        is_space.then_some(Self::Pieces { dropped_spaces })
    }

    /// The bytes of each id, and which ids are bytes of their own.
    pub(super) fn pieces(
        self,
        vocab: HashMap<String, u32>,
        added: &[super::AddedToken],
    ) -> (Vec<Box<[u8]>>, Vec<bool>) {
        let size = vocab.values().max().map_or(0, |&id| id as usize + 1);
        let mut pieces = vec![Box::<[u8]>::default(); size];
        let mut are_bytes = vec![false; size];
        let byte_of: HashMap<char, u8> = byte_stand_ins().map(|(byte, stand_in)| (stand_in, byte)).collect();
        for (piece, id) in vocab {
            pieces[id as usize] = match self {
                Self::ByteLevel => {
                    let bytes: Option<Vec<u8>> = piece.chars().map(|c| byte_of.get(&c).copied()).collect();
                    bytes.unwrap_or_else(|| piece.into_bytes()).into()
                }
                Self::Pieces { .. } => match byte(&piece) {
                    Some(byte) => {
                        are_bytes[id as usize] = true;
                        [byte].into()
                    }
                    None => piece.replace(SPACE, " ").into_bytes().into(),
                },
            };
        }
        if self == Self::ByteLevel {
            for token in added {
                pieces[token.id as usize] = token.content.as_bytes().into();
            }
        }
        (pieces, are_bytes)
    }
}

/// The byte that a piece like `<0x0A>` stands for.
fn byte(piece: &str) -> Option<u8> {
    let digits = piece.strip_prefix("<0x")?.strip_suffix('>')?;
    (digits.len() == 2).then(|| u8::from_str_radix(digits, 16).ok())?
}

/// GPT-2's table: printable Latin-1 bytes stand for themselves, the others for U+0100 onwards.
fn byte_stand_ins() -> impl Iterator<Item = (u8, char)> {
    let mut next = 0x100;
    (0..=255u8).map(move |byte| {
        let is_printable = matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
        let code = if is_printable {
            u32::from(byte)
        } else {
            next += 1;
            next - 1
        };
        (byte, char::from_u32(code).unwrap_or('\u{fffd}'))
    })
}
