//! JSON text as it came.

use serde::de::{Deserialize, Deserializer};
use serde::ser::{Error, Serialize, Serializer};
use serde_json::value::RawValue;

/// One JSON value as its text, not taken apart: members keep their order, numbers their digits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JsonText(Box<str>);

impl JsonText {
    /// The text without white space around it.
    ///
    /// # Errors
    /// It is not JSON.
    pub fn new(text: impl Into<Box<str>>) -> Result<Self, serde_json::Error> {
        let text = text.into();
        let value = serde_json::from_str::<&RawValue>(&text)?.get();
        Ok(if value.len() == text.len() { Self(text) } else { Self(value.into()) })
    }

    /// Text that was read as JSON before, or that a store gives back as it was given.
    pub(crate) fn of_read(text: impl Into<Box<str>>) -> Self {
        Self(text.into())
    }

    /// The text.
    #[must_use]
    pub const fn get(&self) -> &str {
        &self.0
    }
}

impl Serialize for JsonText {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serde_json::from_str::<&RawValue>(&self.0).map_err(S::Error::custom)?.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for JsonText {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(Self(Box::<RawValue>::deserialize(deserializer)?.into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_kept_as_it_is_and_goes_in_and_out_of_json() {
        let text = JsonText::new(" {\"b\" : 1.0, \"a\":\"\\u00e9\"}\n").expect("JSON");
        assert_eq!(text.get(), "{\"b\" : 1.0, \"a\":\"\\u00e9\"}");
        let inside = serde_json::to_string(&[Some(&text), None]).expect("JSON");
        assert_eq!(inside, format!("[{},null]", text.get()));
        let back: Vec<Option<JsonText>> = serde_json::from_str(&inside).expect("JSON");
        assert_eq!(back, [Some(text), None]);
        for bad in ["", "{", "1 2", "NaN"] {
            assert!(JsonText::new(bad).is_err(), "{bad}");
        }
    }
}
