//! Ids: those of tools in a form that Messages clients take, and those that lego makes from the call's id.
//!
//! Clients want `^[a-zA-Z0-9_-]+$`; engines also write `functions.read:0`. Templates print ids, so the next request
//! must give the upstream its own id back: the mapping is undone there.

/// Marks an id that was mapped.
const MARK: &str = "lg-";

/// A tool call's id as the client gets it. Ids that clients take stay as they are.
pub(super) fn to_client(id: &str) -> String {
    if is_plain(id) && !id.starts_with(MARK) {
        return id.to_owned();
    }
    let mut out = String::with_capacity(MARK.len() + 2 * id.len());
    out.push_str(MARK);
    for byte in id.bytes() {
        if byte.is_ascii_alphanumeric() || byte == b'_' {
            out.push(char::from(byte));
        } else {
            out.push_str(&format!("-{byte:02x}"));
        }
    }
    out
}

/// What [`to_client`] was given; other ids stay as they are.
pub(super) fn to_upstream(id: String) -> String {
    match id.strip_prefix(MARK).and_then(decode) {
        Some(original) if to_client(&original) == id => original,
        _ => id,
    }
}

/// The id of a call to which the upstream gave none.
pub(super) fn made_up(call_id: &str, index: usize) -> String {
    format!("toolu_{}_{index}", plain(call_id))
}

/// The message's id.
pub(super) fn message(call_id: &str) -> String {
    format!("msg_{}", plain(call_id))
}

/// The signature of a thinking block: made from the call's id, so that the same call always gives the same one.
/// Only lego would check it, and it does not.
pub(super) fn signature(call_id: &str) -> String {
    base64(format!("lego:v1:{call_id}").as_bytes())
}

fn is_plain(id: &str) -> bool {
    !id.is_empty() && id.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-'))
}

fn plain(id: &str) -> String {
    id.chars().map(|c| if c.is_ascii_alphanumeric() || c == '-' { c } else { '_' }).collect()
}

fn decode(text: &str) -> Option<String> {
    let mut out = Vec::with_capacity(text.len());
    let mut bytes = text.bytes();
    while let Some(byte) = bytes.next() {
        if byte == b'-' {
            let high = char::from(bytes.next()?).to_digit(16)?;
            let low = char::from(bytes.next()?).to_digit(16)?;
            out.push(u8::try_from(high * 16 + low).ok()?);
        } else {
            out.push(byte);
        }
    }
    String::from_utf8(out).ok()
}

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for group in bytes.chunks(3) {
        let mut bits = 0_usize;
        for index in 0..3 {
            bits = bits << 8 | usize::from(group.get(index).copied().unwrap_or(0));
        }
        for digit in 0..4 {
            let is_data = digit <= group.len();
            out.push(if is_data { char::from(DIGITS[bits >> (18 - 6 * digit) & 63]) } else { '=' });
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]

        #[test]
        fn an_id_comes_back_as_it_was(id in "[ -~é\u{1F389}]{1,12}", tail in "[a-f0-9-]{0,8}") {
            for id in [id, format!("lg-{tail}"), tail] {
                if id.is_empty() {
                    continue;
                }
                let client = to_client(&id);
                prop_assert!(is_plain(&client), "{client}");
                prop_assert_eq!(to_upstream(client), id);
            }
        }
    }

    #[test]
    fn plain_ids_stay_and_others_are_mapped() {
        assert_eq!(to_client("chatcmpl-tool-aaaa"), "chatcmpl-tool-aaaa");
        assert_eq!(to_client("functions.read:0"), "lg-functions-2eread-3a0");
        assert_eq!(to_upstream("lg-not-mapped".into()), "lg-not-mapped");
        assert_eq!(to_upstream("lg-ab".into()), "lg-ab");
        assert_eq!(made_up("0190/é", 2), "toolu_0190___2");
    }

    #[test]
    fn base64_is_rfc_4648() {
        let texts = ["", "f", "fo", "foo", "foob", "fooba", "foobar", "lego:v1:toy"];
        let coded = texts.map(|text| base64(text.as_bytes()));
        assert_eq!(
            coded,
            ["", "Zg==", "Zm8=", "Zm9v", "Zm9vYg==", "Zm9vYmE=", "Zm9vYmFy", "bGVnbzp2MTp0b3k="]
        );
    }
}
