use super::*;
use crate::record::example;

fn filter(text: &str) -> Filter {
    text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
}

#[test]
fn errors_say_where_and_what_would_fit() {
    for (text, at, part) in [
        ("", 1, "a column is to stand here, not the end"),
        ("sesion_id = 'a'", 1, "no column sesion_id; the nearest are session_id"),
        ("kind = policy", 8, "a name between '…', not policy"),
        ("kind = 'polcy'", 8, "kind is one of policy, aux"),
        ("kind < 'policy'", 6, "has no order"),
        ("attempt = 'one'", 11, "a whole number"),
        ("attempt = 1.5", 11, "a whole number"),
        ("received_at > '2026-02-30'", 15, "a time (UTC)"),
        ("received_at > '2026-02-3'", 15, "a time (UTC)"),
        ("call_id = '123'", 11, "the whole id of a call"),
        ("attempt like '1%'", 14, "no text"),
        ("routing = 1", 9, "is null"),
        ("attempt not = 1", 13, "in (…) or like"),
        ("attempt = 1 attempt = 2", 13, "join tests by and, or"),
        ("(attempt = 1", 13, ") is missing"),
        ("attempt in (1, 2", 17, ") is missing"),
        ("error = 'abc", 9, "no end"),
        ("error = \"abc\"", 9, "between '…'"),
        ("error is nothing", 10, "null is missing"),
        ("trainable = 1", 13, "true or false"),
        ("attempt = 1 ; attempt = 2", 13, "has no meaning"),
    ] {
        let error = text.parse::<Filter>().map(|filter| filter.to_string()).expect_err(text);
        assert_eq!(error.at, at, "{text}: {error}");
        assert!(error.problem.contains(part), "{text}: {error}");
    }
    let deep = format!("{}attempt = 1{}", "(".repeat(10_000), ")".repeat(10_000));
    assert!(deep.parse::<Filter>().expect_err("too deep").problem.contains("64"));
    // `tokens` is a part of several names.
    let error = "tokens > 1".parse::<Filter>().expect_err("no column");
    assert!(error.problem.contains("prompt_tokens"), "{error}");
}

#[test]
fn words_bind_as_in_sql_and_null_is_neither() {
    let call = example::call(serde_json::json!({"attempt": 2, "harness": "it's", "status": "ok"}));
    for (text, is) in [
        ("attempt = 2", Some(true)),
        ("attempt = 2 OR attempt = 3 AND attempt = 4", Some(true)),
        ("(attempt = 2 or attempt = 3) and attempt = 4", Some(false)),
        ("not attempt = 3 and attempt <> 2", Some(false)),
        ("not (attempt = 3 and attempt = 2)", Some(true)),
        ("harness = 'it''s'", Some(true)),
        ("harness like '_t%_'", Some(true)),
        ("harness like 'it\\%'", Some(false)),
        ("harness in ('x', 'it''s')", Some(true)),
        ("attempt not in (1, 3)", Some(true)),
        ("error = 'x'", None),
        ("not error = 'x'", None),
        ("error != 'x'", None),
        ("error in ('x')", None),
        ("error like '%'", None),
        ("error is null", Some(true)),
        ("error is not null", Some(false)),
        ("error = 'x' or attempt = 2", Some(true)),
        ("error = 'x' and attempt = 3", Some(false)),
        ("error = 'x' and attempt = 2", None),
        ("error = 'x' or attempt = 3", None),
        ("received_at = '1970-01-01'", Some(true)),
        ("received_at < '1970-01-01T00:00:00.000001Z'", Some(true)),
        ("received_at >= '1970-01-01 00:00:01'", Some(false)),
        ("received_at > -1", Some(true)),
        ("date = '1970-01-01'", Some(true)),
        ("sampling_sent.temperature > 1e-3", None),
    ] {
        assert_eq!(filter(text).root.of(&call), is, "{text}");
        assert_eq!(filter(text).matches(&call), is == Some(true), "{text}");
    }
}

/// A row group whose texts are from `b` to `d`, without `c` in its Bloom filter, and with one null of three rows.
struct Letters;

impl Group for Letters {
    fn range(&self, column: &str) -> Option<Range<'_>> {
        let range = |min, max| Range { min: Some(min), max: Some(max), nulls: Some(1), rows: 3 };
        match column {
            "harness" => Some(range(Value::Text("b".into()), Value::Text("d".into()))),
            "model_served" => Some(range(Value::Text("m".into()), Value::Text("m".into()))),
            "received_at" => Some(Range { nulls: Some(0), ..range(Value::Int(10), Value::Int(20)) }),
            "error" => Some(Range { min: None, max: None, nulls: Some(3), rows: 3 }),
            _ => None,
        }
    }

    fn may_contain(&self, column: &str, text: &str) -> bool {
        column != "harness" || text != "c"
    }
}

#[test]
fn row_groups_are_left_out_only_where_statistics_rule_a_match_out() {
    for (text, may) in [
        ("harness = 'a'", false),
        ("harness = 'b'", true),
        ("harness = 'c'", false),
        ("harness = 'e'", false),
        ("harness in ('a', 'c', 'e')", false),
        ("harness in ('a', 'd')", true),
        ("harness not in ('a', 'c')", true),
        ("harness < 'b'", false),
        ("harness <= 'b'", true),
        ("harness > 'd'", false),
        ("harness >= 'd'", true),
        ("not harness >= 'b'", false),
        ("harness like 'a%'", false),
        ("harness like 'cx%'", true),
        ("harness like 'e%'", false),
        ("harness like '%a'", true),
        ("harness not like 'a%'", true),
        ("harness is null", true),
        ("model_served != 'm'", false),
        ("not model_served = 'm'", false),
        ("received_at is null", false),
        ("received_at is not null", true),
        ("received_at < 10", false),
        ("received_at > 19 and received_at < 100", true),
        ("received_at > 20 or harness = 'a'", false),
        ("received_at > 20 or harness = 'b'", true),
        ("not (received_at >= 10 and received_at <= 20)", false),
        ("error is not null", false),
        ("error is null", true),
        // Nothing is known of these.
        ("attempt = 7", true),
        ("date = '2026-11-29'", true),
        ("attempt = 7 and harness = 'a'", false),
    ] {
        assert_eq!(filter(text).may_hold(&Letters), may, "{text}");
    }
    let (some, none): (crate::record::SessionId, Vec<SessionId>) = ("a".parse().expect("id"), vec![]);
    assert!(Filter::sessions([&some]).may_hold(&Letters));
    assert!(!Filter::sessions(&none).may_hold(&Letters));
}
