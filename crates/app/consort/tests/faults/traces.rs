//! Finds what a group could leave behind: processes and shared memory.

use std::fs;

/// Processes whose environment contains `mark`.
pub fn processes(mark: &str) -> Vec<u32> {
    let folders = fs::read_dir("/proc").unwrap().flatten();
    let numbers = folders.filter_map(|folder| folder.file_name().to_str()?.parse().ok());
    let holds = |pid: &u32| {
        let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        environment.windows(mark.len()).any(|piece| piece == mark.as_bytes())
    };
    numbers.filter(holds).collect()
}

/// Zombies of this process, and shared memory segments that it still maps or holds open.
pub fn of_this_program() -> Vec<String> {
    let own = std::process::id();
    let mut found = Vec::new();
    for folder in fs::read_dir("/proc").unwrap().flatten() {
        let Ok(stat) = fs::read_to_string(folder.path().join("stat")) else { continue };
        let Some((_, rest)) = stat.rsplit_once(')') else { continue };
        if rest.split_whitespace().nth(1).and_then(|parent| parent.parse().ok()) == Some(own) {
            found.push(format!("process {stat}"));
        }
    }
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    found.extend(maps.lines().filter(|line| line.contains("consort-group")).map(str::to_owned));
    let files = fs::read_dir("/proc/self/fd").unwrap().flatten().filter_map(|fd| fs::read_link(fd.path()).ok());
    found.extend(
        files.filter_map(|file| file.to_str().filter(|name| name.contains("consort-group")).map(str::to_owned)),
    );
    found
}
