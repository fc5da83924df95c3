//! The configuration of AMX tiles, for the kernels that use them through inline assembly.

use std::arch::asm;

/// Shapes of the eight tiles, in the format of `ldtilecfg`.
#[repr(C, align(64))]
pub(super) struct TileConfig {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl TileConfig {
    /// Tiles of up to 16 rows of up to 64 bytes: `(rows, bytes per row)` of each.
    pub(super) const fn new(tiles: [(usize, usize); 8]) -> Self {
        let mut config = Self { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
        let mut tile = 0;
        while tile < tiles.len() {
            (config.rows[tile], config.row_bytes[tile]) = (tiles[tile].0 as u8, tiles[tile].1 as u16);
            tile += 1;
        }
        config
    }

    /// # Safety
    /// This process may use tiles.
    pub(super) unsafe fn load(&self) {
        // SAFETY: a valid configuration of 64 bytes; the caller guarantees that tiles may be used.
        unsafe { asm!("ldtilecfg [{}]", in(reg) self, options(nostack, readonly)) };
    }
}

/// Releases the tiles, so that the operating system does not save them on a context switch.
///
/// # Safety
/// This process may use tiles.
pub(super) unsafe fn release() {
    // SAFETY: guaranteed by the caller.
    unsafe { asm!("tilerelease", options(nostack, nomem)) };
}
