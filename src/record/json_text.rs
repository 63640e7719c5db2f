//! JSON text as it came.

use bytes::Bytes;
use serde::de::{Deserialize, Deserializer};
use serde::ser::{Error, Serialize, Serializer};
use serde_json::value::RawValue;
use simdutf8::basic::{Utf8Error, from_utf8};

/// One JSON value as its text, not taken apart: members keep their order, numbers their digits. Clones share it, and
/// one made of a body's bytes shares those.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JsonText(Bytes);

impl JsonText {
    /// The text without white space around it.
    ///
    /// # Errors
    /// It is not JSON.
    pub fn new(text: impl Into<String>) -> Result<Self, serde_json::Error> {
        Self::of_bytes(&text.into().into())
    }

    /// The same of bytes, which are not copied.
    ///
    /// # Errors
    /// They are not JSON.
    pub fn of_bytes(text: &Bytes) -> Result<Self, serde_json::Error> {
        let value = serde_json::from_slice::<&RawValue>(text)?.get();
        Ok(Self(text.slice_ref(value.as_bytes())))
    }

    /// Text that was read as JSON before, or that a store gives back as it was given.
    pub(crate) fn of_read(text: impl Into<String>) -> Self {
        Self(text.into().into())
    }

    /// The same of bytes, which are not copied.
    ///
    /// # Errors
    /// They are no text.
    pub(crate) fn of_read_bytes(text: Bytes) -> Result<Self, Utf8Error> {
        from_utf8(&text)?;
        Ok(Self(text))
    }

    /// The text.
    #[must_use]
    pub fn get(&self) -> &str {
        from_utf8(&self.0).expect("it is looked at when it is made")
    }

    /// Its bytes.
    #[must_use]
    pub const fn bytes(&self) -> &Bytes {
        &self.0
    }
}

impl Serialize for JsonText {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serde_json::from_slice::<&RawValue>(&self.0).map_err(S::Error::custom)?.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for JsonText {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(Self::of_read(Box::<str>::from(Box::<RawValue>::deserialize(deserializer)?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_shared_and_not_copied() {
        let body = Bytes::from_static(b" {\"a\": 1}\n");
        let text = JsonText::of_bytes(&body).expect("JSON");
        assert_eq!(text.get(), "{\"a\": 1}");
        for shared in [&text, &text.clone(), &JsonText::of_read_bytes(body.slice(1..9)).expect("text")] {
            assert_eq!(shared.bytes().as_ptr(), body[1..].as_ptr());
        }
        assert!(JsonText::of_bytes(&Bytes::from_static(b"\"\xff\"")).is_err());
        assert!(JsonText::of_read_bytes(Bytes::from_static(b"\xff")).is_err());
    }

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
