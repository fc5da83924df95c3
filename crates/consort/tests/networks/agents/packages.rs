//! The agents, from npm.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The folder of the programs. Installs them unless the same ones are there.
pub fn folder() -> &'static Path {
    static FOLDER: std::sync::OnceLock<PathBuf> = std::sync::OnceLock::new();
    FOLDER.get_or_init(|| {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("agent-packages");
        let list = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/clients/agents/package.json");
        let wanted = fs::read(list).unwrap();
        let (programs, fetched) = (folder.join("node_modules/.bin"), folder.join("fetched.json"));
        if fs::read(&fetched).is_ok_and(|there| there == wanted) {
            return programs;
        }
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("package.json"), &wanted).unwrap();
        let mut npm = npm();
        npm.args(["install", "--no-audit", "--no-fund", "--loglevel=error"]).current_dir(&folder);
        let output = npm.output().unwrap();
        assert!(output.status.success(), "npm: {}", String::from_utf8_lossy(&output.stderr));
        fs::write(fetched, wanted).unwrap();
        programs
    })
}

/// `npm`, which is installed if it is missing and we are root; otherwise the test says what to do.
fn npm() -> Command {
    let is_there = || Command::new("npm").arg("--version").stdout(Stdio::null()).status().is_ok();
    if !is_there() {
        let root = rustix::process::geteuid().is_root();
        assert!(root, "the agents are fetched with npm, which is not installed: apt-get install npm");
        for arguments in [&["update", "-qq"][..], &["install", "-y", "-qq", "--no-install-recommends", "npm"]] {
            let status = Command::new("apt-get").args(arguments).stdout(Stdio::null()).status();
            assert!(status.is_ok_and(|status| status.success()), "apt-get {arguments:?} failed: install npm by hand");
        }
        assert!(is_there(), "Debian's package npm brings a command of that name");
    }
    Command::new("npm")
}
