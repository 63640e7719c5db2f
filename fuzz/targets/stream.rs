//! Server-sent events.

use lego::protocol::json::Edit;
use lego::protocol::sse::Event;

use super::{events, hash, pieces};

/// What a client is given of an event.
fn seen(events: &[Event]) -> Vec<(&str, Vec<u8>, &str, Option<u64>, bool)> {
    let given = events.iter().filter(|event| event.has_data());
    given.map(|e| (e.name.as_str(), e.data().to_vec(), e.id.as_str(), e.retry, e.is_unterminated)).collect()
}

/// However a stream is split, its events are the same and its bytes come out again; a cut in an event's data leaves
/// the rest of the data.
pub fn sse(stream: &[u8]) {
    let whole = events(&[stream]);
    let joined = |events: &[Event]| events.iter().flat_map(|event| event.raw.to_vec()).collect::<Vec<u8>>();
    assert_eq!(joined(&whole), stream);
    let single: Vec<&[u8]> = stream.chunks(1).collect();
    for split in [pieces(stream), single] {
        let events = events(&split);
        assert_eq!(seen(&events), seen(&whole));
        assert_eq!(joined(&events), stream);
    }
    for (number, event) in whole.iter().enumerate().take(64) {
        assert_eq!(event.edited(&[]), event.raw);
        if event.has_data() && !event.is_unterminated {
            // Only a stream's beginning may have a byte order mark.
            cut(event, if number == 0 { b"" } else { b"\n" });
        }
    }
}

fn cut(event: &Event, before: &[u8]) {
    let data = event.data();
    let hash = hash(&event.raw);
    let (a, b) = (hash as usize % (data.len() + 1), (hash >> 32) as usize % (data.len() + 1));
    let span = a.min(b)..a.max(b);
    let edited = event.edited(&[Edit::cut(span.clone())]);
    let stream = [before, &edited].concat();
    let after = events(&[&stream]);
    let after: Vec<&Event> = after.iter().filter(|event| event.has_data()).collect();
    assert_eq!(after.len(), 1, "one event stays one");
    // Line ends are not data and stay.
    let inside = data[span.clone()].iter().copied().filter(|byte| *byte == b'\n');
    let expected: Vec<u8> =
        data[..span.start].iter().copied().chain(inside).chain(data[span.end..].iter().copied()).collect();
    // After `data:` one space is no data, whichever space it is.
    let lines = |text: &[u8]| -> Vec<Vec<u8>> {
        text.split(|byte| *byte == b'\n')
            .map(|line| line[line.iter().position(|byte| *byte != b' ').unwrap_or(line.len())..].to_vec())
            .collect()
    };
    assert_eq!(lines(&after[0].data()), lines(&expected));
}
