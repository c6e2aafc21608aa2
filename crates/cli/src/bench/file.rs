//! Files of results: an earlier one stays as it is until the new one is complete.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

/// Whether [`replace`] will be able to write this file, as far as can be said now. Changes nothing.
pub(super) fn check(file: &Path) -> io::Result<()> {
    // A rename would not ask whether an old file may be written to.
    if file.exists() {
        File::options().append(true).open(file)?;
    }
    if is_special(file) {
        return Ok(());
    }
    let temporary = temporary(file)?;
    File::create(&temporary)?;
    fs::remove_file(temporary)
}

/// Writes a file under a temporary name and renames it.
pub(super) fn replace(file: &Path, text: &str) -> io::Result<()> {
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
            let path = std::env::temp_dir().join(format!("bench-{name}-{}", std::process::id()));
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
}
