//! Files that a user asked for (`--save`, `--trace`, `--bundle` …): an earlier file stays unchanged until the new one
//! is complete. As far as possible, the tool reports a file that cannot be written before the work begins.

use std::fs::{self, File, Permissions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use tempfile::{NamedTempFile, TempPath};

use crate::failure::Failure;
use crate::output::{printable, size};

/// At least the size of a report, so that a full file system refuses it.
const PROBE: usize = 64 << 10;

/// Longest report to read; typical ones have some hundred kilobytes.
const LONGEST_REPORT: u64 = 64 << 20;

/// Why a file was not read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Unreadable {
    #[error(transparent)]
    Failed(#[from] io::Error),
    /// A device or pipe may never end.
    #[error("it is no regular file")]
    NotAFile,
    #[error("it has {}, of at most {}", size(*.len), size(*.most))]
    TooLong { len: u64, most: u64 },
}

/// Reads a whole file, which another user may have made.
pub(crate) fn read(file: &Path, most: u64) -> Result<Vec<u8>, Unreadable> {
    // Opening a pipe would wait for a writer.
    let opened = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(file)?;
    let data = opened.metadata()?;
    if !data.is_file() {
        return Err(Unreadable::NotAFile);
    }
    if data.len() > most {
        return Err(Unreadable::TooLong { len: data.len(), most });
    }
    let mut bytes = Vec::new();
    // The file may grow meanwhile.
    opened.take(most).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// A report that `--save` wrote, or why it cannot be read.
pub(crate) fn read_report<T: DeserializeOwned>(file: &Path) -> Result<T, String> {
    let bytes = read(file, LONGEST_REPORT).map_err(|error| error.to_string())?;
    parse_report(&bytes).map_err(|error| error.to_string())
}

/// Reports are untrusted, and their texts go to a terminal.
pub(crate) fn parse_report<T: DeserializeOwned>(bytes: &[u8]) -> serde_json::Result<T> {
    T::deserialize(printable(serde_json::from_slice(bytes)?))
}

/// Whether [`replace`] will be able to write this file, as far as can be checked. Changes nothing.
pub(crate) fn check(file: &Path) -> Result<(), Failure> {
    try_check(file).map_err(|error| cannot_write(file, &error))
}

/// Writes a file under a temporary name and renames it.
pub(crate) fn replace(file: &Path, text: &str) -> Result<(), Failure> {
    let written = try_replace(file, text);
    written.map_err(|error| cannot_write(file, &error))
}

/// A file that another process writes, under a temporary name until it is complete.
#[derive(Debug)]
pub(crate) struct Pending {
    file: PathBuf,
    /// `None`: a device or pipe, which is written directly.
    temporary: Option<TempPath>,
}

impl Pending {
    pub(crate) fn new(file: &Path) -> Result<Self, Failure> {
        check(file)?;
        let temporary = match ResolvedPath::of(file).and_then(|place| place.temporary()) {
            Ok(temporary) => temporary.map(NamedTempFile::into_temp_path),
            Err(error) => return Err(cannot_write(file, &error)),
        };
        Ok(Self { file: file.to_owned(), temporary })
    }

    /// The file to write to.
    pub(crate) fn path(&self) -> &Path {
        self.temporary.as_deref().unwrap_or(&self.file)
    }

    /// Renames it to its final name, if anything was written.
    pub(crate) fn keep(self) -> Result<(), Failure> {
        let Some(temporary) = self.temporary else { return Ok(()) };
        if fs::metadata(&temporary).is_ok_and(|data| data.len() == 0) {
            return Ok(());
        }
        let kept =
            ResolvedPath::of(&self.file).and_then(|place| Ok(temporary.persist(place.target)?));
        kept.map_err(|error| cannot_write(&self.file, &error))
    }
}

/// The failure for this error, with a remedy that depends on the cause.
pub(crate) fn cannot_write(file: &Path, error: &io::Error) -> Failure {
    let remedy = match error.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => {
            "free space on that file system, or name a file on another"
        }
        ErrorKind::NotFound => "there is no such folder: create it, or name another",
        ErrorKind::IsADirectory => "this is a folder: name a file in it",
        _ => "name a file in a folder that you may write to",
    };
    Failure::unable(format!("cannot write {}: {error}", file.display()), remedy)
}

fn try_check(file: &Path) -> io::Result<()> {
    let place = ResolvedPath::of(file)?;
    // A rename would succeed even if the old file is read-only.
    if file.exists() {
        File::options().append(true).open(file)?;
    }
    match place.temporary()? {
        Some(mut temporary) => temporary.write_all(&[0; PROBE]),
        None => Ok(()),
    }
}

fn try_replace(file: &Path, text: &str) -> io::Result<()> {
    let place = ResolvedPath::of(file)?;
    let Some(mut temporary) = place.temporary()? else {
        return File::options().append(true).open(file)?.write_all(text.as_bytes());
    };
    temporary.write_all(text.as_bytes())?;
    temporary.persist(place.target)?;
    Ok(())
}

/// The location of a file that the user named.
struct ResolvedPath {
    /// The target of a link, or the file itself.
    target: PathBuf,
    /// A terminal, pipe or device such as `/dev/stdout`: there is nothing to keep, and a file must not replace it.
    is_special: bool,
}

impl ResolvedPath {
    fn of(file: &Path) -> io::Result<Self> {
        // Another user with write access to the folder could put a link there. Links like `/dev/stdout` are root's.
        let own = [rustix::process::geteuid().as_raw(), 0];
        if fs::symlink_metadata(file)
            .is_ok_and(|data| data.is_symlink() && !own.contains(&data.uid()))
        {
            return Err(io::Error::new(
                ErrorKind::PermissionDenied,
                "it is a link of another user",
            ));
        }
        let is_special = fs::metadata(file).is_ok_and(|data| !data.is_file() && !data.is_dir());
        let target = fs::canonicalize(file).unwrap_or_else(|_| file.to_owned());
        if target.is_dir() {
            return Err(ErrorKind::IsADirectory.into());
        }
        Ok(Self { target, is_special })
    }

    /// A new file in the same folder, because a rename cannot cross file systems. Its name is random, and it is created
    /// only if no file has that name. `None`: the file is written directly.
    fn temporary(&self) -> io::Result<Option<NamedTempFile>> {
        if self.is_special {
            return Ok(None);
        }
        let name = self.target.file_name().ok_or(ErrorKind::InvalidInput)?;
        // For a plain name, `parent` is empty.
        let folder = self.target.parent().filter(|folder| !folder.as_os_str().is_empty());
        let mut builder = tempfile::Builder::new();
        builder.prefix(name).suffix(".new").permissions(Permissions::from_mode(0o666));
        let made = builder.tempfile_in(folder.unwrap_or(Path::new(".")));
        // Without the temporary name, which means nothing to the user.
        let plain = |error: io::Error| {
            error.raw_os_error().map_or(error.kind().into(), io::Error::from_raw_os_error)
        };
        made.map(Some).map_err(plain)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    fn folder() -> tempfile::TempDir {
        tempfile::tempdir().expect("a folder")
    }

    fn count(folder: &tempfile::TempDir) -> usize {
        fs::read_dir(folder.path()).expect("a folder").count()
    }

    fn text(file: &Path) -> String {
        fs::read_to_string(file).expect("a file")
    }

    #[test]
    fn a_file_is_checked_without_a_trace_and_replaced_behind_its_link() {
        let folder = folder();
        let [old, new, link] = ["old", "new", "link"].map(|name| folder.path().join(name));
        fs::write(&old, "earlier, and longer").expect("a file");
        symlink("old", &link).expect("a link");
        for file in [&old, &new, &link] {
            check(file).expect("can be written");
        }
        assert_eq!((text(&old).as_str(), count(&folder)), ("earlier, and longer", 2));
        replace(&link, "now").expect("written");
        assert!(link.is_symlink());
        assert_eq!((text(&old).as_str(), count(&folder)), ("now", 2));
    }

    /// A user with write access to the folder knows the name of the file and can guess a process id.
    #[test]
    fn links_under_guessed_names_are_not_followed() {
        let folder = folder();
        let [file, victim] = ["report", "victim"].map(|name| folder.path().join(name));
        fs::write(&victim, "secret").expect("a file");
        let guessed = folder.path().join(format!("report.new-{}", std::process::id()));
        symlink(&victim, guessed).expect("a link");
        check(&file).expect("can be written");
        replace(&file, "now").expect("written");
        let pending = Pending::new(&file).expect("can be written");
        fs::write(pending.path(), "later").expect("written");
        pending.keep().expect("renamed");
        assert_eq!([text(&victim), text(&file)], ["secret", "later"]);
        assert_eq!(count(&folder), 3);
    }

    #[test]
    fn a_link_of_another_user_is_refused() {
        let folder = folder();
        let [link, victim] = ["link", "victim"].map(|name| folder.path().join(name));
        fs::write(&victim, "secret").expect("a file");
        symlink(&victim, &link).expect("a link");
        if std::os::unix::fs::lchown(&link, Some(1), None).is_err() {
            println!("skipped: a link of another user, which only root can make");
            return;
        }
        let refused = [check(&link), replace(&link, "now"), Pending::new(&link).map(drop)];
        for failure in refused.map(|refused| refused.expect_err("refused")) {
            assert!(failure.what.ends_with("it is a link of another user"), "{failure}");
        }
        assert_eq!(text(&victim), "secret");
    }

    #[test]
    fn devices_are_written_to_and_folders_refused() {
        let folder = folder();
        let null = Path::new("/dev/null");
        check(null).expect("a device");
        replace(null, "text").expect("a device");
        let pending = Pending::new(null).expect("a device");
        assert_eq!(pending.path(), null);
        pending.keep().expect("nothing to rename");
        assert!(ResolvedPath::of(null).expect("a device").is_special, "it is still a device");
        check(folder.path()).expect_err("a folder");
        check(&folder.path().join("no/file")).expect_err("no folder");
        let failure = replace(Path::new("/dev/full"), "text").expect_err("full");
        assert!(failure.what.contains("No space left"), "{failure}");
        assert!(failure.remedy.contains("free space"), "{failure}");
    }

    #[test]
    fn a_pending_file_replaces_the_earlier_one_only_when_it_is_kept() {
        let folder = folder();
        let file = folder.path().join("old");
        fs::write(&file, "earlier").expect("a file");
        for (keep, afterwards) in [(false, "earlier"), (true, "now")] {
            let pending = Pending::new(&file).expect("can be written");
            fs::write(pending.path(), "now").expect("written");
            assert_eq!(text(&file), "earlier");
            if keep {
                pending.keep().expect("renamed");
            } else {
                drop(pending);
            }
            assert_eq!((text(&file).as_str(), count(&folder)), (afterwards, 1));
        }
    }
}
