//! A JSON object being written member by member, whose values are JSON already.

/// The object so far.
#[derive(Debug, Default)]
pub struct Object(Vec<u8>);

impl Object {
    /// Adds a member. `name` needs no escapes, `value` is JSON.
    pub fn member(&mut self, name: &str, value: &[u8]) {
        self.0.push(if self.0.is_empty() { b'{' } else { b',' });
        self.0.extend_from_slice(format!("\"{name}\":").as_bytes());
        self.0.extend_from_slice(value);
    }

    /// Its text.
    #[must_use]
    pub fn finish(mut self) -> Vec<u8> {
        if self.0.is_empty() {
            self.0.push(b'{');
        }
        self.0.push(b'}');
        self.0
    }
}
