//! Where captures are: in a folder, or in object storage with a folder on this machine for what is not there yet.
//!
//! ```text
//! UPLOADS_TO      in that folder: the URL that its files go to
//! ```
//! The folder has a writer's lock, its journal, and Parquet files until they are uploaded. Readers take a file that is in
//! both places as one. Several machines may have the same URL, each with a folder of its own: names of files have a
//! random part.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use super::error::CaptureError;
use super::layout::{self, DayFileName};
use super::remote::Remote;
use crate::config::{ObjectUrl, ObjectUrlError};

/// Name of the file that says where a folder's files go.
const MARKER: &str = "UPLOADS_TO";

/// A folder, or a URL with its folder.
#[derive(Debug, Clone)]
pub struct Place {
    dir: PathBuf,
    remote: Option<Remote>,
}

impl<P: AsRef<Path> + ?Sized> From<&P> for Place {
    /// A folder of this machine.
    fn from(dir: &P) -> Self {
        Self { dir: dir.as_ref().to_owned(), remote: None }
    }
}

impl From<&Self> for Place {
    fn from(place: &Self) -> Self {
        place.clone()
    }
}

impl Place {
    /// What is named: a folder or a URL. `local`: the folder that goes with a URL, if it is not the usual one. The
    /// network is not asked.
    ///
    /// # Errors
    /// The URL, or what the environment says of its storage, cannot be used.
    pub fn named(named: &Path, local: Option<&Path>) -> Result<Self, CaptureError> {
        let wrong = |error: ObjectUrlError| CaptureError::Url { reason: error.to_string() };
        let Some(url) = ObjectUrl::of(named).map_err(wrong)? else {
            return Ok(Self::from(named));
        };
        let dir = local.map_or_else(|| url.default_folder(), Path::to_owned);
        Ok(Self { dir, remote: Some(Remote::open(url)?) })
    }

    /// The folder on this machine.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// It is a URL.
    #[must_use]
    pub const fn is_remote(&self) -> bool {
        self.remote.is_some()
    }

    pub(super) const fn remote(&self) -> Option<&Remote> {
        self.remote.as_ref()
    }

    /// The folder or the URL, for people.
    #[must_use]
    pub fn shown(&self) -> String {
        match &self.remote {
            Some(remote) => remote.url().to_string(),
            None => self.dir.display().to_string(),
        }
    }

    /// Whether captures can be written there, as far as that can be known before the first one.
    ///
    /// # Errors
    /// They cannot; why, and what to do.
    pub fn check(&self) -> Result<(), CaptureError> {
        self.remote.as_ref().map_or(Ok(()), Remote::check)
    }

    /// Makes sure that a folder is there, or that a URL's own one is no other's.
    ///
    /// # Errors
    /// There are no captures; or the folder belongs to another URL.
    pub(super) fn require(&self) -> Result<(), CaptureError> {
        match &self.remote {
            None if self.dir.is_dir() => Ok(()),
            None => Err(CaptureError::NoFolder { dir: self.dir.clone() }),
            Some(remote) => self.check_marker(remote).map(|_| ()),
        }
    }

    /// Where a bucket has nothing under a prefix, its name is most likely wrong.
    ///
    /// # Errors
    /// Nothing was found in object storage, and nothing of it is known here.
    pub(super) fn expect_some(&self, is_empty: bool) -> Result<(), CaptureError> {
        if is_empty && self.is_remote() && !self.dir.is_dir() {
            return Err(CaptureError::Nothing { place: self.shown() });
        }
        Ok(())
    }

    /// Makes the folder of a URL its own. Only who has its lock may do this.
    ///
    /// # Errors
    /// It belongs to another URL, or has captures that were to stay where they are.
    pub(super) fn claim(&self) -> Result<(), CaptureError> {
        let Some(remote) = &self.remote else { return Ok(()) };
        if self.check_marker(remote)? {
            return Ok(());
        }
        if !layout::days(&self.dir)?.is_empty() || !layout::segments(&self.dir)?.is_empty() {
            let (dir, url) = (self.dir.clone(), remote.url().to_string());
            return Err(CaptureError::OthersFolder { dir, url, owner: "no URL".to_owned() });
        }
        let path = self.dir.join(MARKER);
        let aside = layout::journal_dir(&self.dir).join(format!("{MARKER}.tmp"));
        let write = || {
            let mut file = File::create(&aside)?;
            writeln!(file, "{}", remote.url())?;
            file.sync_all()?;
            fs::rename(&aside, &path)?;
            layout::sync_folder(&self.dir)
        };
        write().map_err(CaptureError::io("write", &path))
    }

    /// Whether the folder says that it is this URL's.
    fn check_marker(&self, remote: &Remote) -> Result<bool, CaptureError> {
        let path = self.dir.join(MARKER);
        let owner = match fs::read_to_string(&path) {
            Ok(owner) => owner,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
            Err(error) => return Err(CaptureError::io("read", &path)(error)),
        };
        let url = remote.url().to_string();
        if owner.trim() == url {
            return Ok(true);
        }
        Err(CaptureError::OthersFolder { dir: self.dir.clone(), url, owner: owner.trim().to_owned() })
    }

    /// The highest number in the names of files of the newest days.
    ///
    /// # Errors
    /// They cannot be listed.
    pub(super) fn last_number(&self) -> Result<Option<u64>, CaptureError> {
        let mut last = layout::last_number(&self.dir)?;
        if let Some(remote) = &self.remote {
            for date in remote.days()?.iter().rev().take(2) {
                for object in remote.objects(date)? {
                    let stem = object.name.strip_suffix(".parquet").unwrap_or_default();
                    if let Some(DayFileName::Segment(name) | DayFileName::Merged(name)) =
                        layout::day_file_name(stem)
                    {
                        last = last.max(Some(name.number));
                    }
                }
            }
        }
        Ok(last)
    }
}
