//! Footers of Parquet files, and the places of pages, each with a checksum: Parquet has none for them, and a flipped bit in
//! the place of a page would give a row what belongs to another.
//!
//! The footer's metadata has them under [`KEY`], eight hexadecimal digits each: of the footer, these digits taken as zeros;
//! then of the offset indexes of each row group, which lie side by side. They stand in the footer before they are known,
//! as zeros, and are put in their place. Files from before there were any are read without the places of their pages.

use std::ops::Range;
use std::sync::Arc;

use parquet::arrow::arrow_reader::{ArrowReaderMetadata, ArrowReaderOptions};
use parquet::errors::{ParquetError, Result};
use parquet::file::FOOTER_SIZE;
use parquet::file::metadata::{
    ColumnChunkMask, FooterTail, KeyValue, PageIndexPolicy, ParquetMetaData, ParquetMetaDataReader,
};
use parquet::file::reader::ChunkReader;

const KEY: &str = "lego.index_crc32c";
/// Digits of a checksum.
const DIGITS: usize = 8;

/// What a footer of so many row groups says before its checksums are known.
pub(super) fn unsigned(groups: usize) -> KeyValue {
    KeyValue::new(KEY.to_owned(), "0".repeat(DIGITS * (1 + groups)))
}

/// Puts the checksums into the end of a file, its bytes from `at` on: all indexes, and the footer.
pub(super) fn sign(end: &mut [u8], at: u64) -> Result<()> {
    let footer = footer_range(end)?;
    let metadata = ParquetMetaDataReader::decode_metadata(&end[footer.clone()])?;
    let Some(digits) = digits(&end[footer.clone()]) else {
        return Err(odd("the footer has no room for its checksums"));
    };
    let first = footer.start + digits.start;
    for group in 0..metadata.num_row_groups() {
        let lost = || odd("the places of pages are not where the footer says");
        let range = places(&metadata, group)?.ok_or_else(lost)?;
        let range = range.start.checked_sub(at).zip(range.end.checked_sub(at)).ok_or_else(lost)?;
        let range = usize::try_from(range.0).ok().zip(usize::try_from(range.1).ok()).ok_or_else(lost)?;
        let sum = crc32c::crc32c(end.get(range.0..range.1).ok_or_else(lost)?);
        write(end, first + DIGITS * (1 + group), sum)?;
    }
    let sum = crc32c::crc32c(&end[footer]);
    write(end, first, sum)
}

fn write(end: &mut [u8], at: usize, sum: u32) -> Result<()> {
    let digits =
        end.get_mut(at..at + DIGITS).ok_or_else(|| odd("the footer has no room for its checksums"))?;
    digits.copy_from_slice(format!("{sum:08x}").as_bytes());
    Ok(())
}

/// A file's footer.
///
/// # Errors
/// There is none, or it is not what was written.
pub(super) fn read<R: ChunkReader>(file: &R) -> Result<ArrowReaderMetadata> {
    let size = file.len();
    let least = (FOOTER_SIZE as u64).min(size);
    let tail = file.get_bytes(size - least, least as usize)?;
    let length = tail_length(&tail)?;
    let start = size.checked_sub((length + FOOTER_SIZE) as u64).ok_or_else(cut)?;
    let footer = file.get_bytes(start, length)?;
    if let Some(digits) = digits(&footer) {
        let own = digits.start..digits.start + DIGITS;
        let sum = crc32c::crc32c_append(crc32c::crc32c(&footer[..own.start]), &[b'0'; DIGITS]);
        let sum = crc32c::crc32c_append(sum, &footer[own.end..]);
        if format!("{sum:08x}").as_bytes() != &footer[own] {
            return Err(odd("its footer is not what was written: its checksum is wrong"));
        }
    }
    let metadata = ParquetMetaDataReader::decode_metadata(&footer)?;
    ArrowReaderMetadata::try_new(Arc::new(metadata), ArrowReaderOptions::new())
}

/// The footer with the places of these columns' pages in these row groups, in ascending order; as it is where the file
/// has no checksum of them.
///
/// # Errors
/// They are not what was written.
pub(super) fn with_pages<R: ChunkReader>(
    file: &R,
    footer: &ArrowReaderMetadata,
    groups: &[usize],
    leaves: impl IntoIterator<Item = usize>,
) -> Result<ArrowReaderMetadata> {
    let metadata = footer.metadata();
    let (Some(first), Some(last)) = (groups.first(), groups.last()) else {
        return Ok(footer.clone());
    };
    let ends = places(metadata, *first)?.zip(places(metadata, *last)?).zip(told(metadata, *last));
    let Some(((first, last), _)) = ends else {
        return Ok(footer.clone());
    };
    // To the library these are the end of a file, of which its indexes are not the very last.
    let end = last.end.checked_add(FOOTER_SIZE as u64).ok_or_else(cut)?;
    let length = end.checked_sub(first.start).and_then(|length| usize::try_from(length).ok());
    let bytes = file.get_bytes(first.start, length.ok_or_else(cut)?)?;
    for &group in groups {
        let part = places(metadata, group)?.map(|range| (range.start - first.start, range.end - first.start));
        let part =
            part.and_then(|(from, to)| bytes.get(usize::try_from(from).ok()?..usize::try_from(to).ok()?));
        check(metadata, group, part.ok_or_else(cut)?)?;
    }
    let mask = ColumnChunkMask::row_groups_and_columns(groups.iter().copied(), leaves);
    let mut reader = ParquetMetaDataReader::new_with_metadata(ParquetMetaData::clone(metadata))
        .with_offset_index_policy(PageIndexPolicy::Optional)
        .with_offset_index_mask(mask);
    reader.read_page_indexes_sized(&bytes, end)?;
    ArrowReaderMetadata::try_new(Arc::new(reader.finish()?), ArrowReaderOptions::new())
}

/// Looks at the places of all pages.
///
/// # Errors
/// They are not what was written.
pub(super) fn check_places<R: ChunkReader>(file: &R, footer: &ArrowReaderMetadata) -> Result<()> {
    let groups: Vec<usize> = (0..footer.metadata().num_row_groups()).collect();
    with_pages(file, footer, &groups, []).map(|_| ())
}

fn check(metadata: &ParquetMetaData, group: usize, bytes: &[u8]) -> Result<()> {
    match told(metadata, group) {
        Some(told) if told == format!("{:08x}", crc32c::crc32c(bytes)) => Ok(()),
        _ => Err(odd("where its pages lie is not what was written: the checksum is wrong")),
    }
}

/// The checksum of a row group's places.
fn told(metadata: &ParquetMetaData, group: usize) -> Option<&str> {
    let pairs = metadata.file_metadata().key_value_metadata()?;
    let told = pairs.iter().find(|pair| pair.key == KEY)?.value.as_deref()?;
    told.get(DIGITS * (1 + group)..DIGITS * (2 + group))
}

/// Where the offset indexes of a row group lie, side by side; `None` if it has none.
fn places(metadata: &ParquetMetaData, group: usize) -> Result<Option<Range<u64>>> {
    let mut all: Option<Range<u64>> = None;
    for column in metadata.row_group(group).columns() {
        let Some((start, length)) = column.offset_index_offset().zip(column.offset_index_length()) else {
            return Ok(None);
        };
        let (start, length) = u64::try_from(start).ok().zip(u64::try_from(length).ok()).ok_or_else(cut)?;
        let end = start.checked_add(length).ok_or_else(cut)?;
        match &mut all {
            None => all = Some(start..end),
            Some(all) if all.end == start => all.end = end,
            Some(_) => return Err(odd("the places of its pages are not side by side")),
        }
    }
    Ok(all)
}

/// Where the footer lies in bytes that end with a file's last ones.
fn footer_range(end: &[u8]) -> Result<Range<usize>> {
    let tail = end.len().saturating_sub(FOOTER_SIZE);
    let start = tail.checked_sub(tail_length(&end[tail..])?).ok_or_else(cut)?;
    Ok(start..tail)
}

fn tail_length(tail: &[u8]) -> Result<usize> {
    Ok(FooterTail::try_new(tail.try_into().map_err(|_| cut())?)?.metadata_length())
}

/// Where a footer has its checksums; `None` if it has none.
fn digits(footer: &[u8]) -> Option<Range<usize>> {
    let key = footer.windows(KEY.len()).rposition(|bytes| bytes == KEY.as_bytes())?;
    // Thrift's compact protocol: the head of a field, the length of its text, seven bits a byte, and the text.
    let value = key + KEY.len() + 1;
    let head = footer.get(value..)?.iter().position(|byte| byte & 0x80 == 0)? + 1;
    let bytes = footer[value..value + head].iter().rev();
    let length = bytes.fold(0_usize, |length, byte| length << 7 | usize::from(byte & 0x7f));
    let range = value + head..(value + head).checked_add(length)?;
    (length >= DIGITS && range.end <= footer.len()).then_some(range)
}

fn odd(what: &str) -> ParquetError {
    ParquetError::General(what.to_owned())
}

fn cut() -> ParquetError {
    ParquetError::EOF("the file ends before its footer does".to_owned())
}

#[cfg(test)]
mod tests;
