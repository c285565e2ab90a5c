package tidemark;

import java.io.IOException;
import java.nio.file.Files;
import java.nio.file.attribute.PosixFilePermissions;
import org.apache.hadoop.fs.Path;
import org.apache.hadoop.fs.RawLocalFileSystem;
import org.apache.hadoop.fs.permission.FsPermission;

/** Hadoop's local file system. It sets the permissions of a file with a system call, not with a `chmod` process. */
public class LocalFiles extends RawLocalFileSystem {
  public void setPermission(Path path, FsPermission wanted) throws IOException {
    if (wanted.getStickyBit()) {
      super.setPermission(path, wanted);
      return;
    }
    String rights = wanted.getUserAction().SYMBOL + wanted.getGroupAction().SYMBOL + wanted.getOtherAction().SYMBOL;
    Files.setPosixFilePermissions(pathToFile(path).toPath(), PosixFilePermissions.fromString(rights));
  }
}
