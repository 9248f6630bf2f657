//! Where things lie: the workspace, the cache folder, a private folder for sockets.

use crate::failure::{Context, Failure, Result};
use std::env;
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// The root of the workspace this program was built in.
pub fn workspace() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the workspace's root")
}

/// The target folder, from where this very program lies: `<target>/debug/xtask`. So that nothing here has to repeat
/// cargo's rules about where it comes from.
pub fn target() -> Result<PathBuf> {
    let program = env::current_exe().cannot("find this program's own path")?;
    match program.parent().and_then(Path::parent) {
        Some(target) => Ok(target.to_path_buf()),
        None => Err(Failure::new(format!("{} does not lie in a target folder", program.display()))),
    }
}

/// The folder for downloaded models: $LLMD_CACHE, else $XDG_CACHE_HOME/llmd, else ~/.cache/llmd.
pub fn cache() -> Result<PathBuf> {
    cache_from(|name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from))
}

fn cache_from(variable: impl Fn(&str) -> Option<PathBuf>) -> Result<PathBuf> {
    if let Some(folder) = variable("LLMD_CACHE") {
        return Ok(folder);
    }
    // The specification of the base folders has a relative path ignored.
    if let Some(folder) = variable("XDG_CACHE_HOME").filter(|f| f.is_absolute()) {
        return Ok(folder.join("llmd"));
    }
    match variable("HOME") {
        Some(home) => Ok(home.join(".cache/llmd")),
        None => Err(Failure::new("none of LLMD_CACHE, XDG_CACHE_HOME and HOME is set: set LLMD_CACHE to a folder")),
    }
}

/// A folder only this user may enter; gone when dropped.
pub struct PrivateFolder {
    path: PathBuf,
}

impl PrivateFolder {
    /// Makes one under $XDG_RUNTIME_DIR, or under the temporary folder where that is not set. The path is kept short:
    /// that of a Unix socket must stay under 108 bytes.
    pub fn new() -> Result<Self> {
        let base = env::var_os("XDG_RUNTIME_DIR")
            .map(PathBuf::from)
            .filter(|folder| folder.is_dir())
            .unwrap_or_else(env::temp_dir);
        let mut builder = fs::DirBuilder::new();
        builder.mode(0o700);
        for attempt in 0..100 {
            let path = base.join(format!("llmd-run-{}-{attempt}", std::process::id()));
            // Creating fails if the name is taken, so a folder laid there by another user is never entered.
            match builder.create(&path) {
                Ok(()) => return Ok(Self { path }),
                Err(error) if error.kind() == ErrorKind::AlreadyExists => continue,
                Err(error) => {
                    return Err(error).cannot(format!("make the folder {}", path.display()));
                }
            }
        }
        Err(Failure::new(format!("{} is full of folders named llmd-run-*: remove them", base.display())))
    }

    /// The path of `name` in it.
    pub fn join(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }
}

impl Drop for PrivateFolder {
    fn drop(&mut self) {
        // A folder left behind is untidy and nothing more; there is nobody to tell in a drop.
        let _ = fs::remove_dir_all(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cache_of(variables: &[(&str, &str)]) -> Option<String> {
        let look_up = |name: &str| variables.iter().find(|v| v.0 == name).map(|v| PathBuf::from(v.1));
        cache_from(look_up).ok().map(|path| path.display().to_string())
    }

    #[test]
    fn the_cache_folder_follows_the_variables_in_order() {
        let all = [("LLMD_CACHE", "/a"), ("XDG_CACHE_HOME", "/b"), ("HOME", "/c")];
        assert_eq!(cache_of(&all).as_deref(), Some("/a"));
        assert_eq!(cache_of(&all[1..]).as_deref(), Some("/b/llmd"));
        assert_eq!(cache_of(&all[2..]).as_deref(), Some("/c/.cache/llmd"));
        assert_eq!(cache_of(&[("XDG_CACHE_HOME", "relative"), ("HOME", "/c")]).as_deref(), Some("/c/.cache/llmd"));
        assert_eq!(cache_of(&[]), None);
    }
}
