//! `<tool_call>\n{"name": …, "arguments": {…}}\n</tool_call>`: Hermes, Qwen 2.5, Qwen 3.
//!
//! A closing tag inside a string of the arguments does not end the call. At the end of the reply a complete call counts
//! without its closing tag.

use super::call_object::{CallObject, Keys, Read};
use super::form::{CallParser, Step};
use super::sink::{Malformation, Sink};
use super::window::{Next, Tags, Window};

const OPEN: Tags = &["<tool_call>"];
const CLOSE: Tags = &["</tool_call>"];
const KEYS: Keys = Keys { arguments: &["arguments"], has_id: false, is_strict: false };

#[derive(Debug)]
pub(super) struct Hermes {
    /// `None` once the object is closed.
    object: Option<CallObject>,
}

impl Hermes {
    pub fn new() -> Self {
        Self { object: None }
    }
}

impl CallParser for Hermes {
    fn tags(&self) -> Tags {
        &["<tool_call>", "</tool_call>"]
    }

    fn openers(&self) -> Tags {
        OPEN
    }

    fn breaks_before(&self) -> usize {
        1
    }

    fn begin(&mut self, _: Option<usize>) {
        self.object = Some(CallObject::new(KEYS));
    }

    fn read(&mut self, window: &mut Window, sink: &mut Sink) -> Result<Step, Malformation> {
        if let Some(object) = &mut self.object {
            if object.read(window, sink)? == Read::Wait {
                return Ok(Step::Wait);
            }
            self.object = None;
        }
        window.skip_space();
        match window.next(CLOSE) {
            Next::Wait => return Ok(Step::Wait),
            Next::Tag(_) => {}
            Next::Other if window.is_end() && window.rest().is_empty() => {}
            Next::Other => return Err(Malformation::Markup),
        }
        sink.end(window);
        Ok(Step::Close)
    }

    fn closers(&self) -> Tags {
        CLOSE
    }
}
