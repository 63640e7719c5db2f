//! JSON values to be compared, whatever printed them.

use serde_json::Value;

/// Beyond this, not every whole number is one of JavaScript's.
const MOST_WHOLE: f64 = 9_007_199_254_740_992.0;

/// A text that is the same for values that are: members in order of their names, a whole number without a point.
#[must_use]
pub fn canonical(value: &Value) -> String {
    let mut text = String::new();
    write(value, &mut text);
    text
}

fn write(value: &Value, out: &mut String) {
    match value {
        Value::Object(members) => {
            let mut keys: Vec<&String> = members.keys().collect();
            keys.sort_unstable();
            out.push('{');
            for key in keys {
                out.push_str(&Value::from(key.as_str()).to_string());
                write(&members[key], out);
            }
            out.push('}');
        }
        Value::Array(items) => {
            out.push('[');
            for item in items {
                write(item, out);
                out.push(',');
            }
            out.push(']');
        }
        Value::Number(number) => {
            let whole = number.as_f64().filter(|value| value.fract() == 0.0 && value.abs() < MOST_WHOLE);
            match whole.filter(|_| number.is_f64()) {
                Some(value) => out.push_str(&(value as i64).to_string()),
                None => out.push_str(&number.to_string()),
            }
        }
        scalar => out.push_str(&scalar.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_printed_otherwise_is_the_same() {
        let of = |text: &str| canonical(&serde_json::from_str(text).expect("JSON"));
        assert_eq!(
            of(r#"{"b":2,"a": {"d":[1 ,1.0],"c":"\u00e9"}}"#),
            of(r#"{"a":{"c":"é","d":[1,1]},"b":2.0}"#)
        );
        for (a, b) in
            [("1", "\"1\""), ("[1,2]", "[2,1]"), ("{\"a\":1}", "{\"a\":2}"), ("0.5", "0.25"), ("[]", "{}")]
        {
            assert_ne!(of(a), of(b));
        }
    }
}
