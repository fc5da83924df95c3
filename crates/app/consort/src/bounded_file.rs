//! Reads files that are small by their nature, such as keys. A path may name anything, even a device without an end.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

/// The bytes of a file. More than `bytes_max` of them are an error.
pub fn read(path: &Path, bytes_max: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(bytes_max + 1).read_to_end(&mut bytes)?;
    match bytes.len() as u64 > bytes_max {
        true => Err(io::Error::other(format!("it is longer than {bytes_max} bytes"))),
        false => Ok(bytes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_read_up_to_its_limit() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(&file, "12345").unwrap();
        assert_eq!(read(file.path(), 5).unwrap(), b"12345");
        assert!(read(file.path(), 4).unwrap_err().to_string().contains("longer than 4 bytes"));
    }

    #[cfg(unix)]
    #[test]
    fn a_device_without_an_end_is_refused() {
        assert!(read(Path::new("/dev/zero"), 1 << 20).is_err());
    }
}
