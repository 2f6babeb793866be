# install(): libehc, headers, a CMake package (find_package(ehc)), and pkg-config.
include(CMakePackageConfigHelpers)

install(TARGETS ehc EXPORT ehcTargets LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY include/ehc DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} FILES_MATCHING PATTERN "*.h")
install(FILES ${PROJECT_BINARY_DIR}/generated/ehc/version.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/ehc)
install(EXPORT ehcTargets NAMESPACE ehc:: DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/ehc)

write_basic_package_version_file(${PROJECT_BINARY_DIR}/ehcConfigVersion.cmake COMPATIBILITY SameMinorVersion)
configure_package_config_file(cmake/ehcConfig.cmake.in ${PROJECT_BINARY_DIR}/ehcConfig.cmake
  INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/ehc)
install(FILES ${PROJECT_BINARY_DIR}/ehcConfig.cmake ${PROJECT_BINARY_DIR}/ehcConfigVersion.cmake
  DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/ehc)

# The .pc file finds the prefix from its own place, so the installed tree can be moved.
file(RELATIVE_PATH EHC_PREFIX_FROM_PC /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
configure_file(cmake/ehc.pc.in ${PROJECT_BINARY_DIR}/ehc.pc @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/ehc.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
