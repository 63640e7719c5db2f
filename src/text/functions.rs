//! What Hugging Face adds to Jinja for chat templates: `tojson` as Python writes JSON, `raise_exception`, `strftime_now`.

use std::io::{self, Write};
use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::value::Kwargs;
use minijinja::{Error, ErrorKind, Value};
use serde::Serialize;

/// Python's `json.dumps(value, ensure_ascii=False)`, with its options. Unlike Jinja's own filter it does not escape for HTML.
pub(super) fn tojson(value: &Value, options: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let ensure_ascii: bool = options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
    let separators: Option<Vec<String>> = options.get("separators")?;
    let sort_keys: bool = options.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    options.assert_all_used()?;
    let (item, key) = match separators.as_deref() {
        None => (if indent.is_some() { "," } else { ", " }, ": "),
        Some([item, key]) => (item.as_str(), key.as_str()),
        Some(_) => {
            let message = "tojson: separators holds two texts, between items and after a key";
            return Err(Error::new(ErrorKind::InvalidOperation, message));
        }
    };
    let failed = |error: serde_json::Error| Error::new(ErrorKind::BadSerialization, error.to_string());
    let mut bytes = Vec::new();
    let formatter = PythonJson { indent, item, key, depth: 0, has_value: false, ensure_ascii };
    let mut writer = serde_json::Serializer::with_formatter(&mut bytes, formatter);
    if sort_keys {
        let mut json = serde_json::to_value(value).map_err(failed)?;
        json.sort_all_objects();
        json.serialize(&mut writer).map_err(failed)?;
    } else {
        value.serialize(&mut writer).map_err(failed)?;
    }
    let text = String::from_utf8(bytes)
        .map_err(|error| Error::new(ErrorKind::BadSerialization, error.to_string()))?;
    Ok(Value::from_safe_string(text))
}

struct PythonJson<'a> {
    indent: Option<usize>,
    item: &'a str,
    key: &'a str,
    depth: usize,
    has_value: bool,
    ensure_ascii: bool,
}

impl PythonJson<'_> {
    fn begin<W: ?Sized + Write>(&mut self, writer: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth += 1;
        self.has_value = false;
        writer.write_all(bracket)
    }

    fn end<W: ?Sized + Write>(&mut self, writer: &mut W, bracket: &[u8]) -> io::Result<()> {
        self.depth -= 1;
        if self.has_value {
            self.new_line(writer)?;
        }
        self.has_value = true;
        writer.write_all(bracket)
    }

    fn next<W: ?Sized + Write>(&mut self, writer: &mut W, is_first: bool) -> io::Result<()> {
        if !is_first {
            writer.write_all(self.item.as_bytes())?;
        }
        self.new_line(writer)
    }

    fn new_line<W: ?Sized + Write>(&self, writer: &mut W) -> io::Result<()> {
        let Some(indent) = self.indent else {
            return Ok(());
        };
        write!(writer, "\n{:width$}", "", width = indent * self.depth)
    }
}

impl serde_json::ser::Formatter for PythonJson<'_> {
    fn begin_array<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.begin(writer, b"[")
    }

    fn end_array<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.end(writer, b"]")
    }

    fn begin_array_value<W: ?Sized + Write>(&mut self, writer: &mut W, is_first: bool) -> io::Result<()> {
        self.next(writer, is_first)
    }

    fn end_array_value<W: ?Sized + Write>(&mut self, _: &mut W) -> io::Result<()> {
        self.has_value = true;
        Ok(())
    }

    fn begin_object<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.begin(writer, b"{")
    }

    fn end_object<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.end(writer, b"}")
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, writer: &mut W, is_first: bool) -> io::Result<()> {
        self.next(writer, is_first)
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(self.key.as_bytes())
    }

    fn end_object_value<W: ?Sized + Write>(&mut self, _: &mut W) -> io::Result<()> {
        self.has_value = true;
        Ok(())
    }

    fn write_string_fragment<W: ?Sized + Write>(&mut self, writer: &mut W, fragment: &str) -> io::Result<()> {
        if !self.ensure_ascii || fragment.is_ascii() {
            return writer.write_all(fragment.as_bytes());
        }
        for unit in fragment.encode_utf16() {
            match u8::try_from(unit) {
                Ok(byte) if byte.is_ascii() => writer.write_all(&[byte])?,
                _ => write!(writer, "\\u{unit:04x}")?,
            }
        }
        Ok(())
    }
}

/// Ends rendering with the template's own message.
pub(super) fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, message))
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];

/// `moment` in UTC, in Python's `strftime` form.
pub(super) fn strftime(moment: SystemTime, format: &str) -> Result<String, Error> {
    let seconds = moment.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let days = seconds / 86_400;
    let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
    // Days to a date of the Gregorian calendar, counted in 400-year eras that begin in March
    // (Howard Hinnant, "chrono-compatible low-level date algorithms", civil_from_days).
    let shifted = days + 719_468;
    let era = shifted / 146_097;
    let day_of_era = shifted % 146_097;
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    let month_name = MONTHS[usize::try_from(month - 1).unwrap_or(0)];
    let day_name = DAYS[usize::try_from(days % 7).unwrap_or(0)];

    let mut text = String::new();
    let mut characters = format.chars();
    while let Some(character) = characters.next() {
        if character != '%' {
            text.push(character);
            continue;
        }
        text += &match characters.next() {
            Some('d') => format!("{day:02}"),
            Some('m') => format!("{month:02}"),
            Some('Y') => format!("{year:04}"),
            Some('y') => format!("{:02}", year % 100),
            Some('H') => format!("{hour:02}"),
            Some('M') => format!("{minute:02}"),
            Some('S') => format!("{second:02}"),
            Some('B') => month_name.to_owned(),
            Some('b') => month_name[..3].to_owned(),
            Some('A') => day_name.to_owned(),
            Some('a') => day_name[..3].to_owned(),
            Some('%') => "%".to_owned(),
            other => {
                let message = format!("strftime_now: %{} is not supported", other.unwrap_or(' '));
                return Err(Error::new(ErrorKind::InvalidOperation, message));
            }
        };
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn dates_are_pythons() {
        let at = |seconds| UNIX_EPOCH + Duration::from_secs(seconds);
        let text = strftime(at(1_796_000_000), "%A %a %d %B %b %Y %y %m %H:%M:%S %%").expect("supported");
        assert_eq!(text, "Monday Mon 30 November Nov 2026 26 11 00:53:20 %");
        assert_eq!(strftime(at(951_782_400), "%Y-%m-%d").expect("supported"), "2000-02-29");
        assert!(strftime(at(0), "%Q").is_err());
    }
}
