//! What the end of a file says is believed only as it was written; with it only the pages of wanted rows are read.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use super::*;
use crate::capture::compact::DayFile;
use crate::capture::storage::Files;
use crate::capture::{Query, Reader};
use crate::record::{Call, example};

/// A file of calls, each with a text of this length, in as many sessions of eight; its row groups have `rows`.
fn file(dir: &Path, calls: usize, text: usize, rows: usize) -> PathBuf {
    let day = dir.join("date=1970-01-01");
    fs::create_dir(&day).expect("a folder");
    let temporary = dir.join("in-the-making");
    let mut file = DayFile::create(&Files::default(), temporary).expect("a file");
    for number in 0..calls {
        // What no compression makes much smaller.
        let mut random = number as u64;
        let letters = (0..text).map(|_| {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            char::from(b'0' + (random >> 58) as u8)
        });
        let of = serde_json::json!({
            "session_id": format!("s{:04}", number / 8), "text": letters.collect::<String>(), "attempt": number % 8,
        });
        file.push(example::call(of)).expect("room");
        if number % rows == rows - 1 {
            file.end_group().expect("room");
        }
    }
    file.seal().expect("sealed");
    let path = day.join("calls-00000001-0000000000000000.parquet");
    file.finish(&Files::default(), dir, &path).expect("named");
    path
}

fn session(dir: &Path, session: &str) -> (Vec<Call>, u64) {
    let query = Query { without_bodies: true, ..Query::session(session.parse().expect("an id")) };
    let mut reader = Reader::open(dir, query).expect("a folder");
    let calls = reader.by_ref().collect::<Result<_, _>>().expect("whole");
    assert_eq!(reader.skipped(), [] as [String; 0]);
    (calls, reader.parquet_bytes_read())
}

#[test]
fn of_a_session_only_its_pages_are_read() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = file(dir.path(), 4096, 4096, usize::MAX);
    let all = fs::metadata(path).expect("a file").len();
    assert!(all > 10 << 20, "{all}");
    for wanted in ["s0000", "s0255", "s0511"] {
        let (calls, bytes) = session(dir.path(), wanted);
        assert_eq!(calls.iter().map(|call| call.attempt).collect::<Vec<_>>(), [0, 1, 2, 3, 4, 5, 6, 7]);
        assert!(calls.iter().all(|call| call.session_id.as_str() == wanted && call.text.is_some()));
        assert!(bytes < all / 8, "{wanted}: {bytes} of {all}");
    }
    assert_eq!(session(dir.path(), "s0512").0.len(), 0);
}

#[test]
fn each_changed_bit_of_footer_and_places_is_found() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = file(dir.path(), 60, 10, 20);
    let whole = fs::read(&path).expect("a file");
    let open = || File::open(&path).expect("a file");
    let footer = read(&open()).expect("a footer");
    assert_eq!(footer.metadata().num_row_groups(), 3);
    let paged = with_pages(&open(), &footer, &[0, 2], [3]).expect("right");
    let index = paged.metadata().page_index().expect("read");
    let has = [0, 1, 2].map(|group| index.offset_index(group, 3).is_some());
    assert_eq!((has, index.offset_index(0, 2).is_some()), ([true, false, true], false));
    check_places(&open(), &footer).expect("right");
    let first = places(footer.metadata(), 0).expect("sound").expect("there").start as usize;
    // With another name there are none, as in an old file: then no page is skipped.
    let name = whole.windows(KEY.len()).rposition(|bytes| bytes == KEY.as_bytes()).expect("there");
    let name = name..name + KEY.len();
    let bytes = (first..whole.len()).step_by(7).chain(whole.len() - 8..whole.len());
    for byte in bytes.filter(|byte| !name.contains(byte)) {
        let mut bad = whole.clone();
        bad[byte] ^= 1 << (byte % 8);
        fs::write(&path, bad).expect("room");
        let looked = read(&open()).and_then(|footer| check_places(&open(), &footer));
        assert!(looked.is_err(), "byte {byte}");
    }
    let mut bad = whole.clone();
    bad[name.start] ^= 1;
    fs::write(&path, bad).expect("room");
    let old = read(&open()).expect("an old one");
    assert!(with_pages(&open(), &old, &[0], [3]).expect("an old one").metadata().page_index().is_none());
    fs::write(&path, &whole[..whole.len() - 1]).expect("room");
    assert!(read(&open()).is_err());
    fs::write(&path, b"").expect("room");
    assert!(read(&open()).is_err());
}
