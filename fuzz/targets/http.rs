//! Replies of HTTP/1.1.

use http::Method;
use lego::upstream::http1::{BodyReader, Head, Malformed};

use super::pieces;

/// All that is read of what follows a head, in these pieces.
fn body(mut reader: BodyReader, pieces: &[&[u8]]) -> (Vec<u8>, usize, bool, Option<Malformed>) {
    let (mut bytes, mut used) = (Vec::new(), 0);
    for piece in pieces {
        let read = reader.read(piece);
        assert!(read.used <= piece.len() && read.bytes.len() <= read.used);
        assert!(read.used == piece.len() || read.error.is_some() || reader.is_over());
        bytes.extend_from_slice(&read.bytes);
        used += read.used;
        if read.used < piece.len() || read.error.is_some() {
            return (bytes, used, reader.is_over(), read.error);
        }
    }
    (bytes, used, reader.is_over(), None)
}

/// A head is read when its last byte has come, not before and not otherwise; however what follows is split, the body
/// is the same.
pub fn http_reply(reply: &[u8]) {
    let head = match Head::parse(reply, &Method::POST) {
        Ok(Some(head)) => head,
        // What is not whole yet was no error at any time before.
        Ok(None) => {
            for end in 0..reply.len() {
                assert!(matches!(Head::parse(&reply[..end], &Method::POST), Ok(None)));
            }
            return;
        }
        Err(_) => return,
    };
    for end in 0..head.bytes {
        assert!(matches!(Head::parse(&reply[..end], &Method::POST), Ok(None)), "{end} of {}", head.bytes);
    }
    let (_, rest) = reply.split_at(head.bytes);
    let whole = body(head.body.clone(), &[rest]);
    let single: Vec<&[u8]> = rest.chunks(1).collect();
    for split in [pieces(rest), single] {
        // An empty piece is the connection's end, which nobody reads.
        let split: Vec<&[u8]> = split.into_iter().filter(|piece| !piece.is_empty()).collect();
        assert_eq!(body(head.body.clone(), &split), whole);
    }
}
