//! Replies that were compressed although lego asks for none: unpacked as they come in, so that the copy can be read
//! and the client gets what it would have got plain.

use std::io::{self, Write};

use bytes::{Bytes, BytesMut};
use flate2::write::{DeflateDecoder, MultiGzDecoder, ZlibDecoder};
use http::header::{self, HeaderMap};

/// Most bytes that one piece may become: a few packed bytes can stand for any number.
const MAX_PLAIN: usize = 256 * 1024 * 1024;
const GZIP: [u8; 2] = [0x1f, 0x8b];

/// What was unpacked of one piece.
#[derive(Default)]
pub(super) struct Bounded(Vec<u8>);

impl Write for Bounded {
    fn write(&mut self, plain: &[u8]) -> io::Result<usize> {
        if self.0.len() + plain.len() > MAX_PLAIN {
            return Err(io::Error::other("a piece of its compressed reply becomes more than 256 MiB"));
        }
        self.0.extend_from_slice(plain);
        Ok(plain.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The state of one reply.
pub(super) enum Unpacker {
    /// No encoding was named: the first bytes tell gzip from anything that a model's reply could be.
    Unnamed(BytesMut),
    /// "deflate" is zlib's form, which some servers get wrong: the first bytes tell.
    Deflated(BytesMut),
    Plain,
    Gzip(MultiGzDecoder<Bounded>),
    Zlib(ZlibDecoder<Bounded>),
    Raw(DeflateDecoder<Bounded>),
    Brotli(Box<brotli_decompressor::DecompressorWriter<Bounded>>),
    Zstd(zstd::stream::write::Decoder<'static, Bounded>),
}

impl std::fmt::Debug for Unpacker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Unpacker")
    }
}

impl Unpacker {
    /// For a reply with these headers, which will say that it is plain. `None`: nobody here can unpack it.
    pub(super) fn of(headers: &mut HeaderMap) -> Option<Self> {
        let named = headers.get(header::CONTENT_ENCODING).map(|value| value.to_str().unwrap_or("?"));
        let unpacker = match named.map(|name| name.trim().to_ascii_lowercase()).as_deref() {
            None | Some("" | "identity") => Self::Unnamed(BytesMut::new()),
            Some("gzip" | "x-gzip") => Self::Gzip(MultiGzDecoder::new(Bounded::default())),
            Some("deflate") => Self::Deflated(BytesMut::new()),
            Some("br") => {
                let decoder = brotli_decompressor::DecompressorWriter::new(Bounded::default(), 8192);
                Self::Brotli(Box::new(decoder))
            }
            Some("zstd") => Self::Zstd(zstd::stream::write::Decoder::new(Bounded::default()).ok()?),
            Some(_) => return None,
        };
        headers.remove(header::CONTENT_ENCODING);
        Some(unpacker)
    }

    /// What becomes of the next bytes.
    pub(super) fn push(&mut self, piece: Bytes) -> io::Result<Bytes> {
        match self {
            Self::Plain => return Ok(piece),
            // Of a reply that begins otherwise nothing is copied.
            Self::Unnamed(start)
                if start.is_empty() && piece.first().is_some_and(|byte| *byte != GZIP[0]) =>
            {
                *self = Self::Plain;
                return Ok(piece);
            }
            Self::Unnamed(start) | Self::Deflated(start) => {
                start.extend_from_slice(&piece);
                if start.len() < 2 {
                    return Ok(Bytes::new());
                }
                let start = start.split().freeze();
                *self = self.told_by(start[0], start[1]);
                return self.push(start);
            }
            _ => {}
        }
        self.write(&piece)?;
        Ok(self.take())
    }

    /// What is left at the end of the reply.
    pub(super) fn finish(&mut self) -> io::Result<Bytes> {
        match self {
            Self::Plain => return Ok(Bytes::new()),
            // A reply of less than two bytes.
            Self::Unnamed(start) | Self::Deflated(start) => return Ok(start.split().freeze()),
            Self::Gzip(decoder) => decoder.try_finish()?,
            Self::Zlib(decoder) => decoder.try_finish()?,
            Self::Raw(decoder) => decoder.try_finish()?,
            Self::Brotli(decoder) => decoder.close()?,
            Self::Zstd(decoder) => decoder.flush()?,
        }
        Ok(self.take())
    }

    fn told_by(&self, first: u8, second: u8) -> Self {
        let is_zlib = first & 0x0f == 8 && u16::from_be_bytes([first, second]).is_multiple_of(31);
        match self {
            Self::Unnamed(_) if [first, second] == GZIP => {
                Self::Gzip(MultiGzDecoder::new(Bounded::default()))
            }
            Self::Unnamed(_) => Self::Plain,
            _ if is_zlib => Self::Zlib(ZlibDecoder::new(Bounded::default())),
            _ => Self::Raw(DeflateDecoder::new(Bounded::default())),
        }
    }

    /// Flushed, so that an event is whole as soon as its bytes are there.
    fn write(&mut self, packed: &[u8]) -> io::Result<()> {
        let decoder: &mut dyn Write = match self {
            Self::Gzip(decoder) => decoder,
            Self::Zlib(decoder) => decoder,
            Self::Raw(decoder) => decoder,
            Self::Brotli(decoder) => decoder,
            Self::Zstd(decoder) => decoder,
            Self::Plain | Self::Unnamed(_) | Self::Deflated(_) => return Ok(()),
        };
        decoder.write_all(packed)?;
        decoder.flush()
    }

    fn take(&mut self) -> Bytes {
        let out = match self {
            Self::Gzip(decoder) => decoder.get_mut(),
            Self::Zlib(decoder) => decoder.get_mut(),
            Self::Raw(decoder) => decoder.get_mut(),
            Self::Brotli(decoder) => decoder.get_mut(),
            Self::Zstd(decoder) => decoder.get_mut(),
            Self::Plain | Self::Unnamed(_) | Self::Deflated(_) => return Bytes::new(),
        };
        std::mem::take(&mut out.0).into()
    }
}
