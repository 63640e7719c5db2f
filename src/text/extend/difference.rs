//! How what a lineage holds differs from what the template makes of its conversation.

use super::super::{ChatInput, ChatTemplate, Decoder, TextError, Tokenizer, encode_chat};

/// Ids shown before and behind the first difference.
const SHOWN_BEFORE: usize = 16;
const SHOWN_BEHIND: usize = 48;

/// The stretch between the first and the last id that a lineage and the rendering of its conversation do not share.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    /// Ids that both begin with: the position of the first difference.
    pub at: usize,
    /// Length of the stretch in the lineage.
    pub lineage_len: usize,
    /// Length of the stretch in the rendering.
    pub rendered_len: usize,
    /// The lineage's text around the first difference.
    pub lineage_text: String,
    /// The rendering's text around the first difference.
    pub rendered_text: String,
}

/// Compares the ids that a lineage holds with the rendering of the conversation that they stand for, as a server that
/// renders every request whole would send it to the model. `None`: they are the same.
///
/// # Errors
/// As [`encode_chat`].
pub fn difference(
    tokenizer: &Tokenizer,
    template: &ChatTemplate,
    lineage: &[u32],
    input: &ChatInput<'_>,
) -> Result<Option<Difference>, TextError> {
    let rendered = encode_chat(tokenizer, template, input)?;
    if rendered == lineage {
        return Ok(None);
    }
    let at = lineage.iter().zip(&rendered).take_while(|(a, b)| a == b).count();
    let (left, right) = (&lineage[at..], &rendered[at..]);
    let shared_end = left.iter().rev().zip(right.iter().rev()).take_while(|(a, b)| a == b).count();
    Ok(Some(Difference {
        at,
        lineage_len: left.len() - shared_end,
        rendered_len: right.len() - shared_end,
        lineage_text: text_around(tokenizer, lineage, at),
        rendered_text: text_around(tokenizer, &rendered, at),
    }))
}

fn text_around(tokenizer: &Tokenizer, ids: &[u32], at: usize) -> String {
    let mut decoder = Decoder::new(false);
    let mut text = String::new();
    for &id in &ids[at.saturating_sub(SHOWN_BEFORE)..ids.len().min(at + SHOWN_BEHIND)] {
        decoder.push(tokenizer, id, &mut text);
    }
    decoder.finish(&mut text);
    text
}
