//! Captures in object storage: the days of a URL, whose objects are named as the files of a folder are.
//!
//! All calls block their thread; the requests run on a thread of this room. Credentials come from the environment and
//! from instance roles alone, as `object_store` reads them, and no text of an error has more of a server's answer than
//! its code. Objects are written once and never changed: a name has a random part.

mod file;
mod http;
mod reason;
mod upload;

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::io::Write as _;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures_util::TryStreamExt as _;
use object_store::aws::AmazonS3Builder;
use object_store::azure::MicrosoftAzureBuilder;
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::path::Path as Key;
use object_store::{
    BackoffConfig, Error as StoreError, ObjectMeta, ObjectStore, ObjectStoreExt as _, PutPayload, RetryConfig,
};
use parquet::arrow::arrow_reader::ArrowReaderMetadata;
use tokio::runtime::Runtime;

pub(super) use file::{Footer, RemoteFile, Stored, Tally, copied};
pub(super) use upload::Uploaded;

use super::error::CaptureError;
use crate::config::{ObjectScheme, ObjectUrl};

/// Bytes of a piece that is sent or fetched at once, where more is wanted.
const PIECE: u64 = 8 << 20;
/// A read that failed on the way is tried so often.
const TRIES: u32 = 4;
/// Pause before the second try; it doubles.
const PAUSE: Duration = Duration::from_millis(200);
/// Footers that are remembered.
const FOOTERS: usize = 256;

/// A bucket's captures.
#[derive(Clone)]
pub(super) struct Remote(Arc<Inner>);

struct Inner {
    url: ObjectUrl,
    store: Arc<dyn ObjectStore>,
    runtime: Option<Runtime>,
    footers: Mutex<Footers>,
}

/// What a file's end says; the first ones are forgotten first.
#[derive(Default)]
struct Footers {
    by_key: HashMap<Key, ArrowReaderMetadata>,
    order: VecDeque<Key>,
}

/// A Parquet file of a day.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Object {
    key: Key,
    /// `YYYY-MM-DD`.
    pub(super) date: String,
    /// With its ending.
    pub(super) name: String,
    pub(super) bytes: u64,
}

impl std::fmt::Debug for Remote {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Remote({})", self.0.url)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        // Waiting for it is not allowed on a thread of another runtime.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl Remote {
    /// Nothing is asked of the network yet.
    ///
    /// # Errors
    /// What the environment says of the storage cannot be used.
    pub(super) fn open(url: ObjectUrl) -> Result<Self, CaptureError> {
        let store = store(&url).map_err(|error| CaptureError::Remote {
            place: url.to_string(),
            action: "use",
            reason: format!("what the environment says of it is wrong: {}", reason::of(&error, &url)),
            is_missing: false,
        })?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("lego-objects")
            .enable_all()
            .build()
            .map_err(CaptureError::io("start the client of", &PathBuf::from(url.to_string())))?;
        Ok(Self(Arc::new(Inner { url, store, runtime: Some(runtime), footers: Mutex::default() })))
    }

    pub(super) fn url(&self) -> &ObjectUrl {
        &self.0.url
    }

    /// The name of an object for people.
    pub(super) fn shown(&self, key: &Key) -> String {
        let ObjectUrl { scheme, bucket, .. } = &self.0.url;
        format!("{}://{bucket}/{key}", scheme.as_str())
    }

    /// Runs a request on the thread of this room. Waiting for it is allowed anywhere.
    fn wait<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Result<T, CaptureError> {
        let (done, told) = std::sync::mpsc::sync_channel(1);
        if let Some(runtime) = &self.0.runtime {
            runtime.spawn(async move {
                // Whoever stopped waiting does not need the answer.
                let _ = done.send(work.await);
            });
        }
        told.recv().map_err(|_| CaptureError::Remote {
            place: self.0.url.to_string(),
            action: "ask",
            reason: "the client's thread is gone".to_owned(),
            is_missing: false,
        })
    }

    /// The same for what may be tried again.
    fn ask<T: Send + 'static, F: Future<Output = Result<T, StoreError>> + Send + 'static>(
        &self,
        place: String,
        action: &'static str,
        mut request: impl FnMut(Arc<dyn ObjectStore>) -> F,
    ) -> Result<T, CaptureError> {
        let mut pause = PAUSE;
        for _ in 1..TRIES {
            match self.wait(request(Arc::clone(&self.0.store)))? {
                Err(error) if reason::is_passing(&error) => std::thread::sleep(pause),
                done => return done.map_err(|error| failed(&place, action, &self.0.url, &error)),
            }
            pause *= 2;
        }
        let done = self.wait(request(Arc::clone(&self.0.store)))?;
        done.map_err(|error| failed(&place, action, &self.0.url, &error))
    }

    fn key(&self, rest: &str) -> Key {
        let prefix = &self.0.url.prefix;
        // Prefixes and names of lego's are checked: nothing in them has to be encoded.
        if prefix.is_empty() { Key::from(rest) } else { Key::from(format!("{prefix}/{rest}")) }
    }

    /// Whether captures can be written and deleted here.
    ///
    /// # Errors
    /// They cannot; why.
    pub(super) fn check(&self) -> Result<(), CaptureError> {
        let key = self.key(&format!(".lego-check-{}", uuid::Uuid::new_v4()));
        let at = key.clone();
        self.ask(self.0.url.to_string(), "write to", move |store| {
            let key = at.clone();
            async move { store.put(&key, PutPayload::from_static(b"lego")).await }
        })?;
        self.delete(&[key])
    }

    /// The days that have objects, sorted.
    pub(super) fn days(&self) -> Result<Vec<String>, CaptureError> {
        let prefix = &self.0.url.prefix;
        let prefix = (!prefix.is_empty()).then(|| Key::from(prefix.as_str()));
        let listed = self.ask(self.0.url.to_string(), "list", move |store| {
            let prefix = prefix.clone();
            async move { store.list_with_delimiter(prefix.as_ref()).await }
        })?;
        let names = listed.common_prefixes.iter().filter_map(Key::filename);
        let mut days: Vec<String> =
            names.filter_map(|name| Some(name.strip_prefix("date=")?.to_owned())).collect();
        days.sort();
        Ok(days)
    }

    /// All that is in the folder of a day, sorted.
    pub(super) fn objects(&self, date: &str) -> Result<Vec<Object>, CaptureError> {
        let folder = self.key(&format!("date={date}"));
        let prefix = folder.clone();
        let listed: Vec<ObjectMeta> = self.ask(self.shown(&folder), "list", move |store| {
            let listed = store.list(Some(&prefix));
            async move { listed.try_collect().await }
        })?;
        let object = |meta: ObjectMeta| {
            let name = meta.location.as_ref().strip_prefix(folder.as_ref())?.strip_prefix('/')?.to_owned();
            Some(Object { date: date.to_owned(), name, bytes: meta.size, key: meta.location })
        };
        let mut objects: Vec<Object> = listed.into_iter().filter_map(object).collect();
        objects.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(objects)
    }

    /// Bytes of an object: all of the range.
    fn fetch(&self, object: &Object, range: Range<u64>) -> Result<Bytes, CaptureError> {
        let key = object.key.clone();
        self.ask(self.shown(&key), "read", move |store| {
            let (key, range) = (key.clone(), range.clone());
            async move {
                let wanted = range.end - range.start;
                let bytes = store.get_range(&key, range).await?;
                if bytes.len() as u64 == wanted {
                    return Ok(bytes);
                }
                let source = format!("{} of {wanted} bytes came", bytes.len()).into();
                Err(StoreError::Generic { store: reason::SHORT, source })
            }
        })
    }

    /// Writes all of an object to a file.
    pub(super) fn copy_to(&self, object: &Object, file: &mut File) -> Result<(), CaptureError> {
        let mut at = 0;
        while at < object.bytes {
            let end = object.bytes.min(at + PIECE);
            let piece = self.fetch(object, at..end)?;
            file.write_all(&piece).map_err(CaptureError::io("write a copy of", &self.path(object)))?;
            at = end;
        }
        Ok(())
    }

    /// What stands for the object where a file's path would.
    pub(super) fn path(&self, object: &Object) -> PathBuf {
        PathBuf::from(self.shown(&object.key))
    }

    pub(super) fn delete_objects(&self, objects: &[Object]) -> Result<(), CaptureError> {
        self.delete(&objects.iter().map(|object| object.key.clone()).collect::<Vec<_>>())
    }

    /// One that is gone already is fine.
    fn delete(&self, keys: &[Key]) -> Result<(), CaptureError> {
        for key in keys {
            let at = key.clone();
            self.ask(self.shown(key), "delete", move |store| {
                let key = at.clone();
                async move {
                    match store.delete(&key).await {
                        Err(StoreError::NotFound { source, .. })
                            if !reason::is_bucket(&source.to_string()) =>
                        {
                            Ok(())
                        }
                        done => done,
                    }
                }
            })?;
        }
        Ok(())
    }

    /// A file's footer, from memory if it was read before.
    fn footer(
        &self,
        key: &Key,
        read: impl FnOnce() -> parquet::errors::Result<ArrowReaderMetadata>,
    ) -> parquet::errors::Result<ArrowReaderMetadata> {
        let footers = || self.0.footers.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = footers().by_key.get(key) {
            return Ok(known.clone());
        }
        let footer = read()?;
        let mut footers = footers();
        if footers.by_key.insert(key.clone(), footer.clone()).is_none() {
            footers.order.push_back(key.clone());
        }
        if footers.order.len() > FOOTERS
            && let Some(oldest) = footers.order.pop_front()
        {
            footers.by_key.remove(&oldest);
        }
        Ok(footer)
    }
}

/// What failed, in words.
fn failed(place: &str, action: &'static str, url: &ObjectUrl, error: &StoreError) -> CaptureError {
    let is_missing =
        matches!(error, StoreError::NotFound { source, .. } if !reason::is_bucket(&source.to_string()));
    CaptureError::Remote { place: place.to_owned(), action, reason: reason::of(error, url), is_missing }
}

fn store(url: &ObjectUrl) -> Result<Arc<dyn ObjectStore>, StoreError> {
    let retry = RetryConfig {
        backoff: BackoffConfig { init_backoff: PAUSE, max_backoff: Duration::from_secs(3), base: 2. },
        max_retries: 3,
        retry_timeout: Duration::from_secs(60),
    };
    Ok(match url.scheme {
        ObjectScheme::S3 => Arc::new(
            AmazonS3Builder::from_env()
                .with_bucket_name(&url.bucket)
                .with_http_connector(http::Connector)
                .with_retry(retry)
                .build()?,
        ),
        ObjectScheme::Gs => Arc::new(
            GoogleCloudStorageBuilder::from_env()
                .with_bucket_name(&url.bucket)
                .with_http_connector(http::Connector)
                .with_retry(retry)
                .build()?,
        ),
        ObjectScheme::Az => Arc::new(
            MicrosoftAzureBuilder::from_env()
                .with_container_name(&url.bucket)
                .with_http_connector(http::Connector)
                .with_retry(retry)
                .build()?,
        ),
    })
}
