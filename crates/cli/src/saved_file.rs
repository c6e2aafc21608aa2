//! Files that a user asked for (`--save`, `--trace`, `--bundle` …): an earlier one stays as it is until the new
//! one is complete, and what cannot be written is told before the work begins, as far as that can be known.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};

use crate::failure::Failure;

/// As much as a report has, or a little more: a full file system refuses it.
const PROBE: usize = 64 << 10;

/// Whether [`replace`] will be able to write this file, as far as can be said now. Changes nothing.
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
    /// `None`: a device or pipe, which is written to as it is.
    temporary: Option<PathBuf>,
}

impl Pending {
    pub(crate) fn new(file: &Path) -> Result<Self, Failure> {
        check(file)?;
        let special = is_special(file);
        let temporary = if special { None } else { temporary(file).ok() };
        Ok(Self { file: file.to_owned(), temporary })
    }

    /// What to write to.
    pub(crate) fn path(&self) -> &Path {
        self.temporary.as_deref().unwrap_or(&self.file)
    }

    /// Puts what was written in its place, if anything was.
    pub(crate) fn keep(mut self) -> Result<(), Failure> {
        match self.temporary.take() {
            Some(temporary) if temporary.exists() => fs::rename(&temporary, target(&self.file))
                .map_err(|error| cannot_write(&self.file, &error)),
            _ => Ok(()),
        }
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if let Some(temporary) = &self.temporary {
            let _ = fs::remove_file(temporary);
        }
    }
}

/// What to do depends on why.
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
    // A rename would not ask whether an old file may be written to.
    if file.exists() {
        File::options().append(true).open(file)?;
    }
    if is_special(file) {
        return Ok(());
    }
    let temporary = temporary(file)?;
    let written = fs::write(&temporary, [0; PROBE]);
    let removed = fs::remove_file(temporary);
    written.and(removed)
}

fn try_replace(file: &Path, text: &str) -> io::Result<()> {
    if is_special(file) {
        return File::options().append(true).open(file)?.write_all(text.as_bytes());
    }
    let temporary = temporary(file)?;
    let written = fs::write(&temporary, text).and_then(|()| fs::rename(&temporary, target(file)));
    if written.is_err() {
        let _ = fs::remove_file(temporary);
    }
    written
}

/// A terminal, pipe or device, as `/dev/stdout`: nothing to keep, and not to be replaced by a file.
fn is_special(file: &Path) -> bool {
    fs::metadata(file).is_ok_and(|data| !data.is_file() && !data.is_dir())
}

/// What a link points to.
fn target(file: &Path) -> PathBuf {
    fs::canonicalize(file).unwrap_or_else(|_| file.to_owned())
}

/// A name in the same folder, because a rename cannot leave the file system.
fn temporary(file: &Path) -> io::Result<PathBuf> {
    let target = target(file);
    if target.is_dir() {
        return Err(io::ErrorKind::IsADirectory.into());
    }
    let mut name = target.file_name().ok_or(io::ErrorKind::InvalidInput)?.to_owned();
    name.push(format!(".new-{}", std::process::id()));
    Ok(target.with_file_name(name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    /// A folder that is removed with it.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let path =
                std::env::temp_dir().join(format!("saved-file-{name}-{}", std::process::id()));
            fs::create_dir_all(&path).expect("a folder");
            Self(path)
        }

        fn names(&self) -> usize {
            fs::read_dir(&self.0).expect("a folder").count()
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn check_changes_neither_an_old_file_nor_the_folder() {
        let folder = Folder::new("check");
        let (old, new) = (folder.0.join("old"), folder.0.join("new"));
        fs::write(&old, "earlier").expect("a file");
        check(&old).expect("can be written");
        check(&new).expect("can be written");
        assert_eq!(fs::read_to_string(&old).expect("a file"), "earlier");
        assert_eq!(folder.names(), 1);
    }

    #[test]
    fn replaced_file_has_the_new_text_and_a_link_to_it_stays() {
        let folder = Folder::new("replace");
        let (old, link) = (folder.0.join("old"), folder.0.join("link"));
        fs::write(&old, "earlier, and longer").expect("a file");
        symlink("old", &link).expect("a link");
        replace(&link, "now").expect("written");
        assert!(link.is_symlink());
        assert_eq!(fs::read_to_string(&old).expect("a file"), "now");
        assert_eq!(folder.names(), 2);
    }

    #[test]
    fn devices_are_written_to_and_folders_refused() {
        let folder = Folder::new("special");
        check(Path::new("/dev/null")).expect("a device");
        replace(Path::new("/dev/null"), "text").expect("a device");
        assert!(is_special(Path::new("/dev/null")), "it is still a device");
        check(&folder.0).expect_err("a folder");
        check(&folder.0.join("no/file")).expect_err("no folder");
    }

    #[test]
    fn a_pending_file_replaces_the_earlier_one_only_when_it_is_kept() {
        let folder = Folder::new("pending");
        let file = folder.0.join("old");
        fs::write(&file, "earlier").expect("a file");
        for keep in [false, true] {
            let pending = Pending::new(&file).expect("can be written");
            fs::write(pending.path(), "now").expect("written");
            assert_eq!(fs::read_to_string(&file).expect("a file"), "earlier");
            if keep {
                pending.keep().expect("renamed");
            } else {
                drop(pending);
            }
            assert_eq!(folder.names(), 1);
        }
        assert_eq!(fs::read_to_string(&file).expect("a file"), "now");
        let device = Pending::new(Path::new("/dev/null")).expect("a device");
        assert_eq!(device.path(), Path::new("/dev/null"));
        device.keep().expect("nothing to rename");
    }

    #[test]
    fn a_full_device_is_told_with_what_to_do() {
        let failure = replace(Path::new("/dev/full"), "text").expect_err("full");
        assert!(failure.what.contains("No space left"), "{failure}");
        assert!(failure.remedy.contains("free space"), "{failure}");
    }
}
