//! Content: a string or parts become chat content.

use super::raw::{Fields, Joined, Object, elements, list, quoted};
use super::refuse::{invalid, unsupported};
use crate::protocol::error::ApiError;

/// Chat content being put together from one or more messages.
#[derive(Default)]
pub(super) struct Content(Vec<Part>);

enum Part {
    /// A JSON string.
    Text(String),
    /// Any other part, whole.
    Other(String),
}

impl Content {
    /// Adds a message's content or a tool's output: a string, or a list of parts.
    ///
    /// # Errors
    /// 400 for content or a part that chat has no form for, naming its path.
    pub fn add(&mut self, raw: &str, path: &str) -> Result<(), ApiError> {
        if raw.starts_with('"') {
            self.0.push(Part::Text(raw.to_owned()));
            return Ok(());
        }
        let Some(parts) = elements(raw) else {
            return Err(invalid(path, "is neither a string nor a list of parts"));
        };
        for (index, part) in parts.into_iter().enumerate() {
            self.0.push(read(part, &format!("{path}[{index}]"))?);
        }
        Ok(())
    }

    /// Adds what the same reply said further on: text goes on where text ended.
    pub fn join(&mut self, next: Self) {
        for (index, part) in next.0.into_iter().enumerate() {
            match (self.0.last_mut(), part) {
                (Some(Part::Text(text)), Part::Text(more)) if index == 0 => {
                    let mut joined = Joined::default();
                    joined.push(text);
                    joined.push(&more);
                    *text = joined.quoted();
                }
                (_, part) => self.0.push(part),
            }
        }
    }

    /// Chat content: a string where it is one text, so that every template can print it; else parts.
    pub fn chat(&self) -> String {
        match self.0.as_slice() {
            [] => quoted(""),
            [Part::Text(text)] => text.clone(),
            parts => {
                let parts: Vec<String> = parts.iter().map(Part::chat).collect();
                list(&parts)
            }
        }
    }
}

impl Part {
    fn chat(&self) -> String {
        match self {
            Self::Text(text) => Object::new().text("type", "text").raw("text", text).end(),
            Self::Other(part) => part.clone(),
        }
    }
}

fn read(raw: &str, path: &str) -> Result<Part, ApiError> {
    let Some(part) = Fields::read(raw) else {
        return Err(invalid(path, "is not an object"));
    };
    let kind = part.string("type").unwrap_or_default();
    let need = |name: &str| {
        part.text(name).ok_or_else(|| invalid(path, &format!("is a part of type {kind:?} without `{name}`")))
    };
    match kind.as_str() {
        "input_text" | "output_text" | "text" => Ok(Part::Text(need("text")?.to_owned())),
        "refusal" => {
            let part = Object::new().text("type", "refusal").raw("refusal", need("refusal")?);
            Ok(Part::Other(part.end()))
        }
        "input_image" => image(&part, path),
        "input_file" => file(&part, path),
        "input_audio" => match part.get("input_audio") {
            Some(audio) => {
                Ok(Part::Other(Object::new().text("type", "input_audio").raw("input_audio", audio).end()))
            }
            None => Err(invalid(path, "is a part of type \"input_audio\" without `input_audio`")),
        },
        "" => Err(invalid(path, "has no `type`")),
        other => Err(unsupported(path, &format!("is a part of type {other:?}, which has no chat form"))),
    }
}

fn image(part: &Fields<'_>, path: &str) -> Result<Part, ApiError> {
    let Some(url) = part.text("image_url") else {
        let problem =
            "is an image without `image_url`: this proxy keeps no files, send its URL or a data URL";
        return Err(unsupported(path, problem));
    };
    let url = Object::new().raw("url", url).maybe("detail", part.get("detail")).end();
    Ok(Part::Other(Object::new().text("type", "image_url").raw("image_url", &url).end()))
}

fn file(part: &Fields<'_>, path: &str) -> Result<Part, ApiError> {
    let Some(data) = part.text("file_data") else {
        return Err(unsupported(path, "is a file without `file_data`: chat takes files only inline"));
    };
    let file = Object::new().maybe("filename", part.get("filename")).raw("file_data", data).end();
    Ok(Part::Other(Object::new().text("type", "file").raw("file", &file).end()))
}
