//! `{"name": …, "parameters": {…}}`: Llama 3, with or without `<|python_tag|>`, more calls after `;`.
//!
//! Without the tag only a reply that begins with such an object is a call; an object that is not one is content, as a
//! JSON answer should be. What follows calls is content. After a malformed call the rest is content: the form has no
//! closing tag to go on from.

use super::call_object::{CallObject, Keys, Read};
use super::form::{CallParser, Step};
use super::sink::{Malformation, Sink};
use super::window::{Tags, Window};

const TAG: Tags = &["<|python_tag|>"];

#[derive(Debug)]
pub(super) struct Llama3Json {
    /// `None` after a call.
    object: Option<CallObject>,
}

impl Llama3Json {
    pub fn new() -> Self {
        Self { object: None }
    }

    fn keys(is_strict: bool) -> Keys {
        Keys { arguments: &["parameters", "arguments"], has_id: false, is_strict }
    }
}

impl CallParser for Llama3Json {
    fn tags(&self) -> Tags {
        TAG
    }

    fn openers(&self) -> Tags {
        TAG
    }

    fn breaks_before(&self) -> usize {
        0
    }

    fn opens_bare(&self) -> bool {
        true
    }

    fn begin(&mut self, opener: Option<usize>) {
        self.object = Some(CallObject::new(Self::keys(opener.is_none())));
    }

    fn read(&mut self, window: &mut Window, sink: &mut Sink) -> Result<Step, Malformation> {
        loop {
            if let Some(object) = &mut self.object {
                if object.read(window, sink)? == Read::Wait {
                    return Ok(Step::Wait);
                }
                self.object = None;
                sink.end(window);
            }
            window.skip_space();
            match window.rest().as_bytes().first() {
                Some(b';') => {
                    window.at += 1;
                    self.object = Some(CallObject::new(Self::keys(false)));
                }
                None if !window.is_end() => return Ok(Step::Wait),
                _ => {
                    // White space belongs to the text that follows.
                    window.at = window.mark;
                    return Ok(Step::Close);
                }
            }
        }
    }

    fn closers(&self) -> Tags {
        &[]
    }
}
