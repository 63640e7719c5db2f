//! A file into object storage. It is there only when what the server stored is known to be what lies here: its MD5,
//! where the server tells one, or else the bytes themselves, read back.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::StreamExt as _;
use md5::{Digest as _, Md5};
use object_store::path::Path as Key;
use object_store::{
    Error as StoreError, MultipartUpload, ObjectMeta, ObjectStore, ObjectStoreExt as _, PutMode, PutPayload,
};

use super::{PIECE, Remote, failed};
use crate::capture::error::CaptureError;

/// What became of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::capture) enum Uploaded {
    Now,
    /// It was there with the same bytes.
    Before,
}

/// Why it is not there.
enum Failure {
    Store(StoreError),
    Local(io::Error),
    /// There is another object of its name.
    Other,
    /// What came back is not what was sent.
    Changed,
}

impl From<StoreError> for Failure {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self::Local(error)
    }
}

impl Remote {
    /// Puts a file where it has the same name, and makes sure of it. What is there under this name is never replaced.
    ///
    /// # Errors
    /// It is not known to be there. [`CaptureError::Corrupt`]: something else is.
    pub(in crate::capture) fn put(&self, file: &Path, rest: &str) -> Result<Uploaded, CaptureError> {
        let key = self.key(rest);
        let (store, at, path) = (Arc::clone(&self.0.store), key.clone(), file.to_owned());
        match self.wait(async move { put(&*store, &at, &path).await })? {
            Ok(uploaded) => Ok(uploaded),
            Err(Failure::Store(error)) => Err(failed(&self.shown(&key), "write", &self.0.url, &error)),
            Err(Failure::Local(error)) => Err(CaptureError::io("read", file)(error)),
            Err(Failure::Other) => {
                let reason = "there is another object of this name, which is not replaced: give this lego another \
                              capture_dir, or take that object away";
                Err(CaptureError::corrupt(Path::new(&self.shown(&key)), reason))
            }
            Err(Failure::Changed) => Err(CaptureError::Remote {
                place: self.shown(&key),
                action: "write",
                reason: "what was stored is not what was sent; it was deleted again".to_owned(),
                is_missing: false,
            }),
        }
    }
}

async fn put(store: &dyn ObjectStore, key: &Key, path: &Path) -> Result<Uploaded, Failure> {
    let local = Local::of(path)?;
    if let Some(there) = head(store, key).await? {
        return if local.is(store, &there).await? { Ok(Uploaded::Before) } else { Err(Failure::Other) };
    }
    let sent =
        if local.bytes <= PIECE { whole(store, key, path).await } else { pieces(store, key, path).await };
    match sent {
        // The answer to an earlier try was lost, or somebody was faster.
        Err(Failure::Store(StoreError::AlreadyExists { .. })) => {
            let there = head(store, key).await?.ok_or(Failure::Changed)?;
            return if local.is(store, &there).await? { Ok(Uploaded::Now) } else { Err(Failure::Other) };
        }
        sent => sent?,
    }
    let there = head(store, key).await?.ok_or(Failure::Changed)?;
    if local.is(store, &there).await? {
        return Ok(Uploaded::Now);
    }
    // It was not there before and nobody else has this name: it is what was just sent, and was changed on its way.
    store.delete(key).await?;
    Err(Failure::Changed)
}

async fn head(store: &dyn ObjectStore, key: &Key) -> Result<Option<ObjectMeta>, Failure> {
    match store.head(key).await {
        Ok(meta) => Ok(Some(meta)),
        Err(StoreError::NotFound { source, .. }) if !super::reason::is_bucket(&source.to_string()) => {
            Ok(None)
        }
        Err(error) => Err(error.into()),
    }
}

async fn whole(store: &dyn ObjectStore, key: &Key, path: &Path) -> Result<(), Failure> {
    let payload = PutPayload::from(Bytes::from(std::fs::read(path)?));
    match store.put_opts(key, payload.clone(), PutMode::Create.into()).await {
        // A server that knows no conditions: nothing was there a moment ago, and the name is unique.
        Err(StoreError::NotImplemented { .. } | StoreError::NotSupported { .. }) => {
            store.put(key, payload).await?;
        }
        sent => {
            sent?;
        }
    }
    Ok(())
}

/// One piece after the other, so that no more than one is in memory and none has to come twice.
async fn pieces(store: &dyn ObjectStore, key: &Key, path: &Path) -> Result<(), Failure> {
    let mut upload = store.put_multipart(key).await?;
    let sent = send(&mut *upload, path).await;
    if sent.is_err() {
        // What cannot be taken back a rule of the bucket's removes (docs/object-storage.md).
        let _ = upload.abort().await;
    }
    sent
}

async fn send(upload: &mut dyn MultipartUpload, path: &Path) -> Result<(), Failure> {
    let mut file = File::open(path)?;
    while let Some(piece) = next_piece(&mut file)? {
        upload.put_part(PutPayload::from(Bytes::from(piece))).await?;
    }
    upload.complete().await?;
    Ok(())
}

fn next_piece(file: &mut File) -> io::Result<Option<Vec<u8>>> {
    let mut piece = Vec::new();
    file.take(PIECE).read_to_end(&mut piece)?;
    Ok((!piece.is_empty()).then_some(piece))
}

/// A file of this machine, and by what it is known.
struct Local {
    bytes: u64,
    crc: u32,
    /// The MD5 as S3 writes it, in quotes or not.
    e_tag: String,
}

impl Local {
    fn of(path: &Path) -> io::Result<Self> {
        let mut file = File::open(path)?;
        let (mut bytes, mut crc, mut sums) = (0, 0, Vec::new());
        while let Some(piece) = next_piece(&mut file)? {
            bytes += piece.len() as u64;
            crc = crc32c::crc32c_append(crc, &piece);
            sums.push(Md5::digest(&piece));
        }
        let e_tag = match sums.as_slice() {
            [one] => hex(one),
            // Of an object that was sent in pieces: the MD5 of theirs, and their number.
            sums => format!("{}-{}", hex(&Md5::digest(sums.concat())), sums.len()),
        };
        Ok(Self { bytes, crc, e_tag })
    }

    /// Whether an object has the same bytes.
    async fn is(&self, store: &dyn ObjectStore, there: &ObjectMeta) -> Result<bool, Failure> {
        if there.size != self.bytes {
            return Ok(false);
        }
        if there.e_tag.as_ref().is_some_and(|e_tag| e_tag.trim_matches('"') == self.e_tag) {
            return Ok(true);
        }
        // A server may encrypt or have another notion of an ETag: then the bytes tell.
        let mut back = store.get(&there.location).await?.into_stream();
        let (mut bytes, mut crc) = (0, 0);
        while let Some(piece) = back.next().await {
            let piece = piece?;
            bytes += piece.len() as u64;
            crc = crc32c::crc32c_append(crc, &piece);
        }
        Ok((bytes, crc) == (self.bytes, self.crc))
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
