//! Where a JSON value ends, and whether it is one: RFC 8259, a byte at a time.

/// How deep values may be nested, as in `serde_json`: whoever reads the arguments has a limit too.
const MAX_DEPTH: usize = 127;

/// What the bytes so far are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Scan {
    /// The value goes on.
    More,
    /// The value ends before this byte of those given last.
    Done(usize),
    /// This byte of those given last cannot stand there.
    Wrong(usize),
}

/// Reads one value. White space before it is part of it, after it is not.
#[derive(Debug, Clone, Default)]
pub(super) struct JsonScanner {
    /// Open brackets: true for an object.
    open: Vec<bool>,
    state: State,
}

#[derive(Debug, Clone, Copy, Default)]
enum State {
    #[default]
    Value,
    /// After `[`.
    FirstItem,
    /// After `{`.
    FirstKey,
    Key,
    Colon,
    AfterValue,
    Text {
        is_key: bool,
    },
    Escape {
        is_key: bool,
    },
    Hex {
        is_key: bool,
        left: u8,
    },
    /// What is left of `true`, `false` or `null`.
    Word(&'static [u8]),
    Number(Number),
}

#[derive(Debug, Clone, Copy)]
enum Number {
    Minus,
    Zero,
    Digits,
    Point,
    Fraction,
    Exponent,
    Sign,
    Power,
}

impl Number {
    fn next(self, byte: u8) -> Option<Self> {
        match (self, byte) {
            (Self::Minus, b'0') => Some(Self::Zero),
            (Self::Minus | Self::Digits, b'0'..=b'9') => Some(Self::Digits),
            (Self::Zero | Self::Digits, b'.') => Some(Self::Point),
            (Self::Point | Self::Fraction, b'0'..=b'9') => Some(Self::Fraction),
            (Self::Zero | Self::Digits | Self::Fraction, b'e' | b'E') => Some(Self::Exponent),
            (Self::Exponent, b'+' | b'-') => Some(Self::Sign),
            (Self::Exponent | Self::Sign | Self::Power, b'0'..=b'9') => Some(Self::Power),
            _ => None,
        }
    }

    fn may_end(self) -> bool {
        matches!(self, Self::Zero | Self::Digits | Self::Fraction | Self::Power)
    }
}

impl JsonScanner {
    /// Reads on. After `Done` or `Wrong` the scanner is spent.
    pub fn push(&mut self, bytes: &[u8]) -> Scan {
        let mut at = 0;
        while at < bytes.len() {
            if let State::Text { .. } = self.state {
                // Most bytes are text of strings.
                let is_plain = |byte: &u8| *byte >= 0x20 && *byte != b'"' && *byte != b'\\';
                at += bytes[at..].iter().take_while(|byte| is_plain(byte)).count();
                if at == bytes.len() {
                    break;
                }
            }
            match self.step(bytes[at]) {
                Step::Next => at += 1,
                Step::Again => {}
                Step::Wrong => return Scan::Wrong(at),
            }
            if self.open.is_empty() && matches!(self.state, State::AfterValue) {
                return Scan::Done(at);
            }
        }
        Scan::More
    }

    /// Whether `text` is one value and nothing else but white space.
    pub fn is_value(text: &str) -> bool {
        let mut scanner = Self::default();
        match scanner.push(text.as_bytes()) {
            Scan::Done(end) => text[end..].bytes().all(super::window::is_space),
            Scan::More => {
                matches!(scanner.state, State::Number(number) if scanner.open.is_empty() && number.may_end())
            }
            Scan::Wrong(_) => false,
        }
    }

    fn step(&mut self, byte: u8) -> Step {
        use super::window::is_space;
        self.state = match (self.state, byte) {
            (State::Text { is_key }, b'"') => {
                if is_key {
                    State::Colon
                } else {
                    State::AfterValue
                }
            }
            (State::Text { is_key }, b'\\') => State::Escape { is_key },
            (State::Text { .. }, 0..0x20) => return Step::Wrong,
            (State::Text { is_key }, _) => State::Text { is_key },
            (State::Escape { is_key }, b'u') => State::Hex { is_key, left: 4 },
            (State::Escape { is_key }, b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't') => {
                State::Text { is_key }
            }
            (State::Hex { is_key, left: 1 }, byte) if byte.is_ascii_hexdigit() => State::Text { is_key },
            (State::Hex { is_key, left }, byte) if byte.is_ascii_hexdigit() => {
                State::Hex { is_key, left: left - 1 }
            }
            (State::Word([next, rest @ ..]), byte) if *next == byte => {
                if rest.is_empty() {
                    State::AfterValue
                } else {
                    State::Word(rest)
                }
            }
            (State::Number(number), byte) => match number.next(byte) {
                Some(number) => State::Number(number),
                None if number.may_end() => {
                    self.state = State::AfterValue;
                    return Step::Again;
                }
                None => return Step::Wrong,
            },
            (
                state @ (State::Value
                | State::FirstItem
                | State::FirstKey
                | State::Key
                | State::Colon
                | State::AfterValue),
                byte,
            ) if is_space(byte) => state,
            (State::FirstItem, b']') | (State::FirstKey, b'}') => self.close(),
            (State::FirstKey | State::Key, b'"') => State::Text { is_key: true },
            (State::Colon, b':') => State::Value,
            (State::AfterValue, b',') => {
                if self.open.last() == Some(&true) {
                    State::Key
                } else {
                    State::Value
                }
            }
            (State::AfterValue, b'}') if self.open.last() == Some(&true) => self.close(),
            (State::AfterValue, b']') if self.open.last() == Some(&false) => self.close(),
            (State::Value | State::FirstItem, byte) => match byte {
                b'{' | b'[' if self.open.len() < MAX_DEPTH => {
                    self.open.push(byte == b'{');
                    if byte == b'{' { State::FirstKey } else { State::FirstItem }
                }
                b'"' => State::Text { is_key: false },
                b't' => State::Word(b"rue"),
                b'f' => State::Word(b"alse"),
                b'n' => State::Word(b"ull"),
                b'-' => State::Number(Number::Minus),
                b'0' => State::Number(Number::Zero),
                b'1'..=b'9' => State::Number(Number::Digits),
                _ => return Step::Wrong,
            },
            _ => return Step::Wrong,
        };
        Step::Next
    }

    fn close(&mut self) -> State {
        self.open.pop();
        State::AfterValue
    }
}

enum Step {
    Next,
    /// The byte belongs to what follows.
    Again,
    Wrong,
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// `serde_json`'s word on it.
    fn is_json(text: &str) -> bool {
        serde_json::from_str::<serde::de::IgnoredAny>(text).is_ok()
    }

    #[test]
    fn values_are_those_of_serde_json() {
        let texts = [
            "{}",
            "[]",
            " {\"a\" : [1, -0.5e+3, true, null, \"\\u00e9\\n\"]} ",
            "{\"a\":1,}",
            "[,]",
            "{1:2}",
            "01",
            "-",
            "1.",
            "1.5",
            "1e",
            "1e5",
            "nul",
            "null",
            "\"\\x\"",
            "\"\\u12g4\"",
            "\"a\nb\"",
            "{\"a\"}",
            "",
            " ",
            "{}x",
            "1 2",
            "[1",
            "\"",
            "\"\\ud800\"",
            "[1}",
            "{\"a\":1]",
            "tru e",
            "-01",
            "+1",
            ".5",
            "\u{feff}{}",
        ];
        for text in texts {
            assert_eq!(JsonScanner::is_value(text), is_json(text), "{text}");
        }
    }

    #[test]
    fn values_are_as_deep_as_serde_json_reads() {
        for depth in [127, 128] {
            let text = "[".repeat(depth) + &"]".repeat(depth);
            let read = serde_json::from_str::<serde_json::Value>(&text);
            assert_eq!(JsonScanner::is_value(&text), read.is_ok(), "{depth}");
        }
    }

    proptest! {
        #[test]
        fn any_text_is_judged_as_serde_json_does(text in "[\\[\\]{}\",:0-9eE.+\\-\\\\unrltfasé \n]{0,16}") {
            prop_assert_eq!(JsonScanner::is_value(&text), is_json(&text), "{}", text);
        }

        #[test]
        fn a_value_ends_at_the_same_byte_however_it_is_cut(text in "[\\[\\]{}\",:01 é]{0,12}") {
            let mut whole = JsonScanner::default();
            let expected = whole.push(text.as_bytes());
            let mut scanner = JsonScanner::default();
            let mut found = Scan::More;
            for (at, byte) in text.bytes().enumerate() {
                match scanner.push(&[byte]) {
                    Scan::More => continue,
                    Scan::Done(end) => found = Scan::Done(at + end),
                    Scan::Wrong(end) => found = Scan::Wrong(at + end),
                }
                break;
            }
            prop_assert_eq!(found, expected);
        }
    }
}
